"""A worker that cannot load is named once and left out; the run ends only if none can load."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import assay
from many_rows import assert_every_row_once, write_many

from pipeline.errors import AssayError, ModelError, StorageError
from pipeline.options import RunOptions
from pipeline.runtime.job import Run
from pipeline.runtime.mailbox import Letter
from pipeline.runtime.progress import STARTING_WORKERS, WorkerReport
from pipeline.runtime.reading import output_of
from pipeline.runtime.watch import GRACE_S, Workers
from pipeline.spec.parse import load_spec
from pipeline.verbs.run import judged_run

REPOSITORY = Path(__file__).parents[2]
FULL = StorageError("/cache/models/m: the model cannot be written: the disk is full")


def letter(worker: str, node: str, cause: AssayError) -> Letter:
    report = WorkerReport(STARTING_WORKERS)
    return Letter(report, worker, node, is_last=True, cause=cause, starts_again=False)


def test_each_node_and_cause_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers(100.0)
    for worker, node, cause in [
        ("process 1 on a", "n1", FULL),
        ("process 2 on a", "n1", FULL),
        ("process 3 on b", "n2", FULL),
        ("process 4 on a", "n1", ModelError("torn")),
        ("process 5 on a", "n1", FULL),
    ]:
        workers.note(letter(worker, node, cause), 0.0)
    assert caplog.messages == [
        f"process 1 on a cannot load: {FULL}; it is left out",
        f"process 3 on b cannot load: {FULL}; it is left out",
        "process 4 on a cannot load: torn; it is left out",
    ]


def test_workers_that_cannot_load_end_the_run_with_their_own_error_where_no_other_reports() -> None:
    is_out = [False]
    workers = Workers(100.0, workers=2, is_out=lambda: is_out[0])
    workers.note(letter("a", "n1", FULL), 0.0)
    workers.note(Letter(WorkerReport(STARTING_WORKERS), "b", "n2"), 5.0)
    workers.check(100.0)  # — on another node, a worker may still be starting
    is_out[0] = True
    workers.check(5.0 + GRACE_S - 1)
    with pytest.raises(StorageError, match="the disk is full"):
        workers.check(5.0 + GRACE_S)
    workers.begin()  # the next round
    workers.check(1e9)


def run_on_two_nodes(*arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, __file__, *map(str, arguments)],
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        | {"PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests/support")))},
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("documents", [400, 40])
def test_a_node_whose_workers_cannot_load_is_named_once_and_left_out(
    documents: int, write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    spec = write_spec(input=write_many(tmp_path, documents, shard_bytes=20_000))
    ended = run_on_two_nodes(spec)
    assert ended.returncode == 0, ended.stderr
    assert_every_row_once(tmp_path / "out", documents)
    named = [line for line in ended.stderr.splitlines() if line.endswith("; it is left out")]
    assert len(named) == 1 or (not named and documents < 400), ended.stderr
    assert all("cannot load: RuntimeError: CUDA error at loading; " in line for line in named)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_run_in_which_no_worker_can_load_ends_with_the_cause(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    spec = write_spec(input=write_many(tmp_path, 400, shard_bytes=20_000))
    code, _, errors = assay(spec, fault="loading=fail:")
    assert code == 1, errors
    assert errors.splitlines()[-1].startswith("assay: RuntimeError: CUDA error at loading"), errors[
        -3000:
    ]
    named = [line for line in errors.splitlines() if line.endswith("; it is left out")]
    assert len(named) <= 1 and "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_node_with_another_folder_as_output_is_named_once_and_gets_no_label(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    """The path is absolute, and each node has another folder there."""
    (other := tmp_path / "other").mkdir()
    documents = write_many(tmp_path, 400, shard_bytes=20_000)
    ended = run_on_two_nodes(write_spec(input=documents, output="/proc/self/cwd/out"), other)
    assert ended.returncode == 0, ended.stderr
    assert_every_row_once(tmp_path / "out", 400)
    assert not list(other.iterdir())
    (named,) = [line for line in ended.stderr.splitlines() if line.endswith("; it is left out")]
    reason = "cannot load: /proc/self/cwd/out: the output on this machine is not that of the driver"
    assert re.search(rf"process \d+ on [\d.]+ {reason}", named), named


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_node_that_lacks_the_folder_of_the_input_is_named_once_and_gets_no_shard(
    write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    (other := tmp_path / "other").mkdir()
    documents = write_many(tmp_path, 400, shard_bytes=20_000)
    ended = run_on_two_nodes(
        write_spec(input={**documents, "path": "/proc/self/cwd/many.jsonl"}), other
    )
    assert ended.returncode == 0, ended.stderr
    assert_every_row_once(tmp_path / "out", 400)
    assert "a shard failed" not in ended.stderr
    (named,) = [line for line in ended.stderr.splitlines() if line.endswith("; it is left out")]
    assert "cannot load: /proc/self/cwd: the input is not on this machine; mount" in named


@pytest.mark.parametrize("made", [False, True], ids=["missing", "empty"])
def test_a_worker_that_lacks_the_folder_of_the_input_cannot_load(
    made: bool, write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    spec = load_spec(write_spec(input=write_many(tmp_path, 1, shard_bytes=20_000)))
    job: Any = SimpleNamespace(spec=spec, run=Run(input_folder=str(folder)))
    if made:
        folder.mkdir()
    with pytest.raises(StorageError, match=f"^{folder}: the input is not on this machine; mount"):
        output_of(job)
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").touch()
    assert output_of(job).url == spec.output


def test_an_input_folder_that_may_not_be_listed_is_on_this_machine(
    write_spec: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(write_spec(input=write_many(tmp_path, 1, shard_bytes=20_000)))
    job: Any = SimpleNamespace(spec=spec, run=Run(input_folder=str(tmp_path / "in")))

    def refuse(_folder: str) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pipeline.runtime.reading.os", SimpleNamespace(listdir=refuse))
    assert output_of(job).url == spec.output


def main(spec: Path, folder: Path | None = None) -> None:
    """A run on a Ray of two nodes, of which the workers of one cannot load a model.

    With a folder, the workers of one node are in it, and those of the other node and the driver are
    in that of the spec, so `/proc/self/cwd/NAME` is two outputs. A process of its own: pytest's
    would be the Ray's driver.
    """
    import ray
    from ray.cluster_utils import Cluster

    logging.basicConfig(level=logging.WARNING)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    if folder is None:
        made.add_node(num_cpus=2, env_vars={"ASSAY_FAULT": "loading=fail:"})
    else:
        os.chdir(folder)
        made.add_node(num_cpus=2)
        os.chdir(spec.parent)
    made.add_node(num_cpus=2)
    made.wait_for_nodes()
    # — it has no token, and listens where other machines may reach it
    options, cache = RunOptions(insecure_cluster=True), spec.parent / "cache"
    try:
        outcome = judged_run(
            load_spec(spec), cache_dir=cache, address=made.address, options=options
        )
        assert outcome.complete and outcome.snapshot == 1, outcome
    finally:
        ray.shutdown()
        made.shutdown()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
