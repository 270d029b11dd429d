"""A cast copy of a model's files gives the same model, and processes share its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from vision import vision_network, vision_tokenizer

from pipeline.inference.loading import load_model
from pipeline.inference.model.casting import cast_files, needs_cast
from pipeline.inference.model.loaded import LoadedModel

MAPS = Path("/proc/self/maps")


def mapped(model: LoadedModel, folder: Path) -> list[bool]:
    """For each weight, whether it is in memory that is mapped from a file of the folder."""
    lines = [line.split() for line in MAPS.read_text().splitlines() if str(folder) in line]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    places = [weight.data_ptr() for weight in model.network.parameters()]
    return [any(start <= place < stop for start, stop in ranges) for place in places]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize(("stored", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_cast_copy_gives_the_weights_that_transformers_casts(
    family: str, stored: str, dtype: str, make_network: Callable[..., Any], tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    target.mkdir()
    make_network(family).to(getattr(torch, stored)).save_pretrained(source)
    assert needs_cast(source, dtype) and not needs_cast(source, stored)
    cast_files(source, target, dtype)
    assert not needs_cast(target, dtype)
    expected = load_model(source, dtype=dtype, device="cpu")
    actual = load_model(target, dtype=dtype, device="cpu")
    weights = dict(actual.network.named_parameters())
    for name, weight in expected.network.named_parameters():
        assert_close(weights[name], weight, rtol=0, atol=0)
    assert not any(mapped(expected, source))
    if family != "qwen3_moe":  # transformers joins the experts, which copies them
        assert all(mapped(actual, target))


def test_a_model_that_sees_images_may_be_cast(tmp_path: Path) -> None:
    vision_network("llava", vision_tokenizer("llava")).save_pretrained(tmp_path)
    assert needs_cast(tmp_path, "bfloat16") and not needs_cast(tmp_path, "float32")


def test_a_family_that_keeps_weights_in_float32_is_not_cast(
    make_network: Callable[..., Any], tmp_path: Path
) -> None:
    make_network("nemotron_h").save_pretrained(tmp_path)
    assert not needs_cast(tmp_path, "bfloat16")


def test_tensors_of_other_formats_are_left_to_transformers(
    make_network: Callable[..., Any], tmp_path: Path
) -> None:
    make_network("llama").to(torch.float8_e4m3fn).save_pretrained(tmp_path)
    assert not needs_cast(tmp_path, "bfloat16")
