"""A folder whose files do not fit together is refused by name when its model is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import ModelError
from pipeline.inference.loading import load_model, load_tokenizer

MakeNetwork = Callable[..., Any]


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def without_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()


def with_other_shapes(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=32)


def with_half_a_file(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1_000])


def without_a_tensor(folder: Path) -> None:
    """transformers would put random values in its place, and name it in a report."""
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, weights, {"format": "pt"})


def with_tensors(folder: Path, **more: torch.Tensor) -> None:
    weights = folder / "model.safetensors"
    save_file({**load_file(weights), **more}, weights, {"format": "pt"})


def with_fewer_layers(folder: Path) -> None:
    """The weights of the layers that are left out have no place."""
    edit_json(folder / "config.json", num_hidden_layers=1)


def with_a_bias(folder: Path) -> None:
    with_tensors(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(4)})


def with_weights_of_a_head(folder: Path) -> None:
    with_tensors(folder, **{"score.weight": torch.zeros(4)})


def with_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')


def without_heads(folder: Path) -> None:
    edit_json(folder / "config.json", num_attention_heads=0)


def of_an_unknown_family(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="other")


def of_gptq(folder: Path) -> None:
    """Its library is not installed, which transformers says by an ImportError."""
    quantized = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    edit_json(folder / "config.json", quantization_config=quantized)


def without_a_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    "damage, reason",
    [
        (without_configuration, "cannot be loaded"),
        (with_other_shapes, r"cannot be loaded: model\.layers\.0\.mlp\.\w+\.weight has the shape"),
        (with_fewer_layers, r"cannot be loaded: 9 tensors .* no place .* model\.layers\.1\.input"),
        (with_a_bias, r"cannot be loaded: 1 tensors .* model\.layers\.0\.self_attn\.q_proj\.bias"),
        (with_weights_of_a_head, r"cannot be loaded: 1 tensors .* score\.weight"),
        (with_a_broken_tokenizer, "its tokenizer cannot be loaded"),
        (without_heads, "cannot be loaded"),
        (of_an_unknown_family, "cannot be loaded: .* model type"),
        (of_gptq, "cannot be loaded: .*GPTQ"),
        (with_half_a_file, "cannot be loaded"),
        (
            without_a_tensor,
            r"cannot be loaded: .* lack 1 .* model\.layers\.1\.mlp\.down",
        ),
        (without_a_tokenizer, "its tokenizer cannot be loaded"),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_named(
    damage: Callable[[Path], None],
    reason: str,
    model_folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    damage(folder)
    with pytest.raises(ModelError, match=f"^{folder}: {reason}") as refused:
        load_tokenizer(folder)
        load_model(folder, dtype="float32", device="cpu")
    assert len(str(refused.value).splitlines()) == 1 and not caplog.records


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "model.embed_tokens.position_ids",
        "model.vision_tower.patch.weight",
        "visual.blocks.0.attn.qkv.weight",
        "mtp.layers.0.mlp.up_proj.weight",
    ],
)
def test_weights_that_models_are_saved_with_and_do_not_use_are_no_mistake(
    name: str, model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    with_tensors(folder, **{name: torch.zeros(4)})
    with_it, without = (
        load_model(each, dtype="float32", device="cpu").network.state_dict()
        for each in (folder, model_folder)
    )
    assert with_it.keys() == without.keys()


def test_a_head_that_is_also_the_embedding_may_be_in_the_files(
    make_network: MakeNetwork, tmp_path: Path
) -> None:
    network = make_network("llama", tie_word_embeddings=True)
    network.save_pretrained(tmp_path)
    with_tensors(tmp_path, **{"lm_head.weight": network.lm_head.weight.clone()})
    loaded = load_model(tmp_path, dtype="float32", device="cpu").network
    torch.testing.assert_close(loaded.lm_head.weight, network.lm_head.weight, rtol=0, atol=0)
