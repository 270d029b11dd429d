"""Runs in processes of their own that are killed: nothing is lost, and nothing is doubled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from local_cluster import command_line, wait_until
from many_rows import assert_every_row_once, has_begun, write_many

from pipeline.ledger.dataset import open_labels

DOCUMENTS = 600
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `assay run` of a spec; what still runs when the test ends is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def run(spec: Path, **variables: str) -> subprocess.Popen[bytes]:
        command = [Path(sys.executable).with_name("assay"), "run", str(spec), "--json"]
        environment = {**os.environ, "ASSAY_CACHE": str(tmp_path / "cache"), **variables}
        with (tmp_path / "log").open("ab") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.xdist_group("ray")
def test_a_killed_driver_and_a_killed_worker_lose_and_double_nothing(
    write_spec: Callable[..., Path], start: Start, tmp_path: Path
) -> None:
    output, died = tmp_path / "out", tmp_path / "died"
    spec = write_spec(input=write_many(tmp_path, DOCUMENTS, shard_bytes=20_000))
    process = start(spec)
    wait_until(lambda: has_begun(output), process.poll, pause_s=0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in family if "ray::Map" in " ".join(command_line(child))]
    assert workers
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive, "labelling went on without its driver"
    assert not list(output.glob("snapshots/*.json"))
    before = {file: file.stat().st_mtime_ns for file in output.glob("labels/*/*/*/*.parquet")}
    # — in the run that goes on, a worker is killed at the last document
    again = start(spec, ASSAY_FAULT=f"document d{DOCUMENTS - 1}=die:{died}")
    assert again.wait(timeout=300) == 0 and died.exists()
    assert all(file.stat().st_mtime_ns == written for file, written in before.items())
    assert_every_row_once(output, DOCUMENTS)
    # — the file of a write that a kill interrupted begins with "create-"; gc deletes it, and marks
    left = [file.name for file in (output / "attempts").iterdir() if file.name != "in-use"]
    assert not [name for name in left if not name.startswith("create-")]


def label_files(output: Path) -> set[Path]:
    return {*output.glob("labels/*/*/*/*.parquet")}


# What the output has when a phase of a run that proves a promise has begun.
PHASES: dict[str, Callable[[Path], bool]] = {
    "the whole model answers": lambda output: len(label_files(output)) > 1,
    "a readout answers": lambda output: any(output.glob("cascades/*/*.safetensors")),
    "a promise is proved": lambda output: any(output.glob("cascades/*/*.json")),
    "a cascade answers": lambda output: (
        any(output.glob("cascades/*/*.json")) and len(label_files(output)) > last_sample(output)
    ),
}


def last_sample(output: Path) -> int:
    """The label files that were there when the certificate was written."""
    [proved] = output.glob("cascades/*/*.json")
    written = proved.stat().st_mtime_ns
    return sum(file.stat().st_mtime_ns <= written for file in label_files(output)) + 1


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_run_killed_while_it_fits_a_cascade_ends_with_the_same_certificate(
    write_spec: Callable[..., Path], start: Start, tmp_path: Path
) -> None:
    cascade = {"agree": 0.6, "sample": 60}
    task = {"name": "topic", "question": "About it?", "labels": ["art", "law"], "cascade": cascade}
    corpus = write_many(tmp_path, DOCUMENTS, shard_bytes=20_000)
    results: dict[str, tuple[bytes, list[object]]] = {}
    for phase in ("", *PHASES):
        output = tmp_path / f"out{len(results)}"
        spec = write_spec(input=corpus, tasks=[task], output=str(output))
        before: dict[Path, int] = {}
        if phase:
            process = start(spec)
            wait_until(partial(PHASES[phase], output), process.poll, pause_s=0.02)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert not list(output.glob("snapshots/*.json"))
            before = {file: file.stat().st_mtime_ns for file in label_files(output)}
        assert start(spec).wait(timeout=400) == 0
        # — what was answered is not asked again
        assert all(file.stat().st_mtime_ns == written for file, written in before.items())
        [certificate] = output.glob("cascades/*/*.json")
        rows = open_labels(str(output)).to_table(columns=["doc_id", "topic"]).to_pylist()
        results[phase] = certificate.read_bytes(), rows
    undisturbed = results.pop("")
    assert b'"thresholds":{' in undisturbed[0] and len(undisturbed[1]) == DOCUMENTS
    assert all(each == undisturbed for each in results.values())
