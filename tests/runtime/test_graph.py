"""What keeps a worker from being built is raised by its first call; what ends it is reported."""

from __future__ import annotations

import gzip
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from command import WITH_MODEL, assay
from label_tables import toy_shard
from ray.exceptions import WorkerCrashedError

from pipeline.errors import (
    AssayError,
    LoadError,
    MissingColumnsError,
    ModelError,
    Problem,
    SpecError,
    StorageError,
    UnavailableError,
    UnreadableError,
    WorkerError,
)
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.counts import ShardCounts
from pipeline.runtime import graph, left_out
from pipeline.runtime.graph import Places, ShardWorker, on_a_node
from pipeline.runtime.mailbox import Post
from pipeline.sources.shards import Shard
from pipeline.sources.source import InputObject, cut
from pipeline.spec.schema import Columns

POST = Post(None, 600.0)


@pytest.mark.parametrize(
    "error",
    [
        ModelError("the weights are torn"),
        UnavailableError("the model's store is gone"),
        SpecError([Problem("model.path", "names no model", "m")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_worker_that_cannot_load_raises_the_reason_when_it_is_called(
    error: AssayError, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _, _ = failing_worker(monkeypatch, error, later=False, post=None)
    with pytest.raises(type(error)) as raised:
        worker(row_of_work())
    assert raised.value is error


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


@pytest.mark.parametrize("later", [True, False], ids=["lazily", "in the constructor"])
@pytest.mark.parametrize("cause", [StorageError("the disk is full"), OSError(28, "No space left")])
def test_a_worker_that_cannot_load_reports_why_and_stays_ended(
    cause: Exception, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = LoadError(cause) if later else cause
    worker, sent, killed = failing_worker(monkeypatch, error, later=later)
    with pytest.raises(KilledError):
        worker(row_of_work())
    assert killed == ["for good"]
    ((reason, starts_again),) = sent
    assert isinstance(reason, AssayError) and not starts_again
    assert any(text in str(reason) for text in ("disk is full", "No space left"))


@pytest.mark.parametrize(
    "cause",
    [RuntimeError("CUDA error"), AssertionError("3 rows"), ModelError("internal error")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_rows_ends_the_process_and_ray_starts_another(
    cause: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, sent, killed = failing_worker(monkeypatch, WorkerError(cause), later=True)
    with pytest.raises(KilledError):
        worker(row_of_work())
    assert killed == ["this process"]
    ((reason, starts_again),) = sent
    assert str(cause) in str(reason) and starts_again


def failing_worker(
    monkeypatch: pytest.MonkeyPatch, error: Exception, *, later: bool, post: Post | None = POST
) -> tuple[ShardWorker, list[tuple[AssayError, bool]], list[str]]:
    """A worker that cannot load, or label; why it ends, and how its process is ended."""
    sent: list[tuple[AssayError, bool]] = []
    killed: list[str] = []

    def refuse(*_arguments: object, **_named: object) -> Any:
        raise error

    def end(how: str) -> None:
        killed.append(how)
        raise KilledError

    class Ends:
        def __init__(self, _post: Post) -> None: ...

        def end(self, cause: AssayError, *, starts_again: bool = True) -> None:
            sent.append((cause, starts_again))

    module = SimpleNamespace(load_readers=refuse, label_shard=refuse)
    if later:
        module.load_readers = lambda *_of, **_how: []
    context = SimpleNamespace(current_actor=None)
    monkeypatch.setattr(graph, "sender", lambda _post: lambda _report: None)
    monkeypatch.setattr(left_out, "Sender", Ends)
    monkeypatch.setattr(graph, "_worker_module", lambda: module)
    monkeypatch.setattr(graph, "output_of", lambda _job: None)
    monkeypatch.setattr(graph.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(graph.ray, "kill", lambda *_of, **_how: end("for good"))
    monkeypatch.setattr(graph.os, "kill", lambda *_of: end("this process"))
    return ShardWorker(any_job(), asks=True, post=post), sent, killed


def any_job(*, gpus: int = 0) -> Any:
    """A job of which nothing is asked."""
    return SimpleNamespace(
        placement=SimpleNamespace(gpus=gpus, threads=1),
        spec=SimpleNamespace(output="", storage_options={}, server=None),
        run=SimpleNamespace(is_over=False, ends=None, shown="", input_folder=""),
    )


def row_of_work() -> pa.Table:
    work = WorkItem(toy_shard(), ("a",), documents=True)
    return pa.table({graph.WORK: [pickle.dumps(work)]})


@pytest.mark.parametrize("suspect", range(3))
def test_a_shard_that_may_kill_its_worker_is_labelled_alone(suspect: int) -> None:
    """Two places: the shards that are at work while each one is, by the place of the suspect."""
    places, at_work, beside = Places(2), set[int](), dict[int, set[int]]()

    def label(number: int) -> None:
        with places.of(number == suspect):
            at_work.add(number)
            time.sleep(0.05)
            beside[number] = {*at_work}
            at_work.discard(number)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(label, range(3)))
    assert beside.keys() == {0, 1, 2} and beside[suspect] == {suspect}


@pytest.mark.parametrize(("gpus", "most"), [(1, 2), (0, 1)])
def test_on_a_gpu_one_shard_is_labelled_while_another_is_read(
    gpus: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls at once on a GPU, and one on CPUs."""
    at_work, at_once, entered = set[str](), list[int](), threading.Lock()
    together = threading.Barrier(most)

    def label(_job: Any, _readers: Any, _store: Any, work: WorkItem, **_how: Any) -> Any:
        with entered:
            at_work.add(threading.current_thread().name)
            at_once.append(len(at_work))
        together.wait(timeout=60)
        time.sleep(0.05)  # — for one more, if one more could begin
        with entered:
            at_work.discard(threading.current_thread().name)
        return ShardCounts(work.shard.id, work.tasks)

    module = SimpleNamespace(load_readers=lambda *_of, **_how: [], label_shard=label)
    monkeypatch.setattr(graph, "_worker_module", lambda: module)
    monkeypatch.setattr(graph, "output_of", lambda _job: None)
    worker = ShardWorker(any_job(gpus=gpus), asks=True)
    with ThreadPoolExecutor(4) as calls:
        list(calls.map(lambda _: worker(row_of_work()), range(4)))
    assert max(at_once) == most


@pytest.mark.xdist_group("ray")
def test_a_node_cuts_a_file_as_this_process_does_or_raises_the_reason(
    shared_ray: None, tmp_path: Path
) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(40))
    (whole := tmp_path / "a.jsonl").write_bytes(lines)
    (torn := tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines)[:-9])
    columns = Columns("text", None)
    source = InputObject(str(whole), len(lines), "x", "jsonl")

    def on_node(*of: Any, **options: Any) -> list[Shard]:
        return on_a_node(partial(cut, *of, **options), num_cpus=1)

    assert on_node(source, columns, 100) == cut(source, columns, 100)
    with pytest.raises(UnreadableError, match=f"{torn}: cannot be read"):
        on_node(InputObject(str(torn), 1, "x", "jsonl.gz"), columns, 100)
    with pytest.raises(MissingColumnsError, match=f"{whole} has no such column"):
        on_node(source, Columns("text", "id"), 100)
    assert on_node(source, Columns("text", "id"), 100, lacking=True)


def test_a_call_that_no_node_could_end_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one whose nodes are lost each time that Ray tries it: exit code 3."""

    def lost(*_: object) -> None:
        raise WorkerCrashedError

    task = SimpleNamespace(remote=lambda *_of, **_how: None)
    monkeypatch.setattr("ray.remote", lambda **_how: lambda _function: task)
    monkeypatch.setattr("ray.get", lost)
    with pytest.raises(UnavailableError, match=r"Ray cannot go on: .*; run again: finished shards"):
        on_a_node(list, num_cpus=1)
