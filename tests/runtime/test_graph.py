"""What keeps a worker from being built is told by the worker's first call, with its own kind."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from command import WITH_MODEL, assay

from pipeline.errors import AssayError, ModelError, Problem, SpecError, UnavailableError
from pipeline.runtime.graph import LabelStage, ReadStage

STAGES = {
    "ReadShards": lambda: list(ReadStage(ANY)(pa.table({}))),
    "LabelDocuments": lambda: list(LabelStage(ANY, asks=True)(pa.table({}))),
}
ANY: Any = None  # a job that nothing is asked of


@pytest.mark.parametrize("worker", STAGES)
@pytest.mark.parametrize(
    "error",
    [
        ModelError("the weights are torn"),
        UnavailableError("the model's store is gone"),
        SpecError([Problem("model.path", "names no model", "m")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_worker_that_cannot_be_built_says_why_when_it_is_called(
    worker: str, error: AssayError, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def refuse(*_arguments: object, **_named: object) -> None:
        built.append(worker)
        raise error

    monkeypatch.setattr(f"pipeline.runtime.worker.{worker}", refuse)
    with pytest.raises(type(error)) as raised:
        STAGES[worker]()
    assert raised.value is error and built == [worker]
    assert any(entry.name == "__call__" for entry in raised.traceback)


@pytest.mark.parametrize("command", WITH_MODEL)
def test_torn_weights_are_one_line_and_an_exit_code(
    command: Sequence[str], write_spec: Callable[..., Path], model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "torn"
    shutil.copytree(model_folder, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1_000])
    code, result, errors = assay(write_spec(model={"path": str(folder)}), command=command)
    assert (code, result) == (1, {})
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith(f"assay: {folder}: cannot be loaded: ")
