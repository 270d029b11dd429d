"""`assay check` of a model that keeps keys and values in 8 bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.inference.model.loaded import LoadedModel

WriteSpec = Callable[..., Path]


def test_kept_keys_in_8_bits_are_weighed_too(
    write_spec: WriteSpec, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write_spec(model={"path": str(model_folder), "dtype": "float32", "kv": "int8"})
    assert main(["check", str(spec), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["kv"] == "int8" and found["exactness"]["max_abs_dp"] <= 1e-4
    assert 0 < found["quantization"]["max_abs_dp"] < 0.2
    assert main(["check", str(spec)]) == 0
    assert "float32, kv: int8 on cpu" in " ".join(capsys.readouterr().out.split())


def test_a_model_of_recurrent_layers_keeps_nothing_in_8_bits(
    write_spec: WriteSpec,
    tiny_model: Callable[[str], LoadedModel],
    model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hybrid = tmp_path / "hybrid"
    shutil.copytree(model_folder, hybrid, ignore=shutil.ignore_patterns("*.safetensors"))
    tiny_model("qwen3_5_text").network.save_pretrained(hybrid)
    assert main(["check", str(write_spec(model={"path": str(hybrid), "kv": "int8"}))]) == 2
    assert "model.kv: layers with a recurrent state keep it" in capsys.readouterr().err
