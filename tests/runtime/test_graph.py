"""What keeps a worker from being built is told by its first call; what ends it is reported."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from command import WITH_MODEL, assay

from pipeline.errors import (
    AssayError,
    LoadError,
    ModelError,
    Problem,
    SpecError,
    StorageError,
    UnavailableError,
    WorkerError,
)
from pipeline.ledger.blocks import ShardCounts, work_rows
from pipeline.ledger.cells import WorkItem
from pipeline.runtime import graph
from pipeline.runtime.graph import LabelStage, ReadStage, Stage
from pipeline.runtime.progress import Post
from pipeline.sources.shards import ObjectVersion, Piece, Shard

PIECE = Piece(0, 10, 1, None, None)

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
    assert errors.splitlines()[-1].startswith(f"assay: {folder}/model.safetensors: is not whole: ")


class KilledError(BaseException):
    """In the place of the end of this process."""


@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("later", [True, False], ids=["lazily", "in the constructor"])
@pytest.mark.parametrize("cause", [StorageError("the disk is full"), OSError(28, "No space left")])
def test_a_worker_that_cannot_load_reports_why_and_stays_ended_unless_it_is_the_last(
    cause: Exception, later: bool, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, sent, killed = failing_stage(monkeypatch, LoadError(cause) if later else cause, later)
    monkeypatch.setattr(Post, "others_can_label", lambda _: others)
    block = pa.Table.from_pylist(work_rows([work_item()]))
    if others:
        with pytest.raises(KilledError):
            list(stage(block))
        assert killed == ["for good"]
    else:
        (row,) = (row for made in stage(block) for row in made.to_pylist())
        counts = ShardCounts.from_row(row)
        assert counts.unable and (counts.error or "").startswith("/in/c.jsonl: rows 0 to 10: ")
        assert any(text in str(counts.error) for text in ("disk is full", "No space left"))
        assert killed == []
    assert all(isinstance(report["cause"], AssayError) for report in sent)
    assert len(sent) == (1 if later else 2)  # at once, and before it asks for the others
    assert sent[-1]["ended"] is False


@pytest.mark.parametrize(
    "cause",
    [RuntimeError("CUDA error"), AssertionError("3 rows"), ModelError("internal error")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_rows_ends_the_process_and_ray_starts_another(
    cause: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, sent, killed = failing_stage(monkeypatch, WorkerError(cause), later=True)
    with pytest.raises(KilledError):
        list(stage(pa.Table.from_pylist(work_rows([work_item()]))))
    assert killed == ["this process"]
    (report,) = sent
    assert report["ended"] is True and str(cause) in str(report["cause"])


def failing_stage(
    monkeypatch: pytest.MonkeyPatch, error: Exception, later: bool
) -> tuple[Stage, list[dict[str, Any]], list[str]]:
    """A stage whose worker fails; what it reports, and how its process is ended."""
    sent: list[dict[str, Any]] = []
    killed: list[str] = []

    def refuse(*_arguments: object, **_named: object) -> Any:
        raise error

    def end(how: str) -> None:
        killed.append(how)
        raise KilledError

    def send(report: object, **changes: Any) -> None:
        if report is None:
            sent.append(changes)

    context = SimpleNamespace(current_actor=None)
    monkeypatch.setattr(graph, "sender", lambda _post: send)
    monkeypatch.setattr(graph.ray, "get", lambda *_of, **_how: None)
    monkeypatch.setattr(graph.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(graph.ray, "kill", lambda *_of, **_how: end("for good"))
    monkeypatch.setattr(graph.os, "kill", lambda *_of: end("this process"))
    worker = (lambda send: refuse) if later else refuse
    return Stage(worker, Post(None, 600.0, engines=2)), sent, killed


def work_item() -> WorkItem:
    shard = Shard(ObjectVersion("/in/c.jsonl", 1, "e", "jsonl", "text", None), PIECE)
    return WorkItem(shard, ("a",), documents=True)
