"""A run on Ray in processes of its own, and its kill: nothing is lost, and nothing is doubled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from local_cluster import command_line
from many_rows import assert_every_row_once, has_begun, write_many

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


def wait_until_begun(output: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not has_begun(output):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "no label file after two minutes"
        time.sleep(0.05)


@pytest.mark.xdist_group("ray")
def test_a_killed_driver_and_a_killed_worker_lose_and_double_nothing(
    write_spec: Callable[..., Path], start: Start, tmp_path: Path
) -> None:
    output, died = tmp_path / "out", tmp_path / "died"
    spec = write_spec(input=write_many(tmp_path, DOCUMENTS, shard_bytes=20_000))
    process = start(spec)
    wait_until_begun(output, process)
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
