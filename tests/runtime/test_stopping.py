"""A run on a real Ray that is interrupted, or whose worker stops: exit code 3, and what is kept."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from many_rows import assert_every_row_once, write_many

from pipeline.runtime.limits import usable_cores
from pipeline.runtime.mailbox import STALL_LIMIT_S

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


class Logged:
    """A run whose lines of standard error are read as they come."""

    def __init__(
        self, spec: Path, *, stall_limit_s: float = STALL_LIMIT_S, **variables: str
    ) -> None:
        environment = {**os.environ, "ASSAY_CACHE": str(spec.parent / "cache"), **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RUN, str(stall_limit_s), "run", str(spec)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._timer = threading.Timer(300, self.process.kill)
        self._timer.start()

    def until(self, pattern: str) -> None:
        """Reads up to a line with the pattern."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if re.search(pattern, line):
                return
        pytest.fail("\n".join(self.lines))

    def end(self) -> int:
        """Reads to the end; the exit code."""
        assert self.process.stderr is not None
        self.lines += self.process.stderr.read().splitlines()
        self.process.stderr.close()
        self._timer.cancel()
        return self.process.wait(timeout=60)


# — a shell's background job ignores SIGINT, and a test may run in one
_RUN = """
import signal, sys
from functools import partial
signal.signal(signal.SIGINT, signal.default_int_handler)
from pipeline.cli import main
from pipeline.runtime import run
run.Watch = partial(run.Watch, stall_limit_s=float(sys.argv[1]))
sys.argv[0] = "assay"
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def long_spec(write_spec: Callable[..., Path], tmp_path: Path) -> Path:
    return write_spec(input=write_many(tmp_path, 4_000, shard_bytes=20_000))


@pytest.mark.parametrize(
    ("moment", "stop"),
    [
        ("starting Ray$", signal.SIGINT),
        ("starting the workers$", signal.SIGINT),
        (" documents labelled", signal.SIGINT),
        ("starting the workers$", signal.SIGTERM),
        (" documents labelled", signal.SIGTERM),
        (" documents labelled", signal.SIGHUP),
    ],
)
def test_ctrl_c_ends_the_run_and_says_what_is_kept_and_how_to_continue(
    moment: str, stop: signal.Signals, long_spec: Path
) -> None:
    run = Logged(long_spec)
    run.until(moment)
    family = psutil.Process(run.process.pid).children(recursive=True)
    run.process.send_signal(stop)
    assert run.end() == 3, run.lines
    last = run.lines[-1]
    assert re.match(r"assay: stopped; at least [\d,]+ of 4,000 documents are kept; ", last)
    assert last.endswith(f"to continue, run: assay run {long_spec}")
    _, left = psutil.wait_procs(family, timeout=5)
    assert not left
    # — every line is of our log: nothing of Ray's own
    assert [line for line in run.lines[:-1] if not re.match(r"\d\d:\d\d:\d\d \w", line)] == []


@pytest.mark.parametrize("service", ["gcs_server", "raylet"])
def test_the_death_of_a_process_of_ray_ends_the_run_with_one_line(
    service: str, long_spec: Path
) -> None:
    run = Logged(long_spec)
    run.until(" documents labelled")
    family = psutil.Process(run.process.pid).children(recursive=True)
    (killed,) = [each for each in family if each.name() == service]
    killed.kill()
    assert run.end() == 3, run.lines
    (line,) = [line for line in run.lines if f"Ray's {service} has ended" in line]
    assert line.endswith("run the same command again: finished shards are kept")
    _, left = psutil.wait_procs(family, timeout=20)
    assert not left


def test_a_run_whose_last_worker_is_stopped_ends(
    write_spec: Callable[..., Path], model_folder: Path, tmp_path: Path
) -> None:
    # — with all cores there is one worker
    model = {"path": str(model_folder), "dtype": "float32", "threads": usable_cores()}
    spec = write_spec(input=write_many(tmp_path, 4_000, shard_bytes=20_000), model=model)
    run = Logged(spec, stall_limit_s=5)
    run.until(" documents labelled")
    family = psutil.Process(run.process.pid).children(recursive=True)
    workers = [each for each in family if "ShardWorker" in " ".join(each.cmdline())]
    time.sleep(2.0)  # — a worker sends its last report once a second
    for worker in workers:
        worker.suspend()
    assert run.end() == 3, run.lines
    last = run.lines[-1]
    assert last.startswith("assay: no worker is at work; process "), run.lines
    assert "many.jsonl: rows " in last and "run the same command again" in last
    ended, _ = psutil.wait_procs(workers, timeout=30)
    assert len(ended) == len(workers), "a stopped worker is left behind"


@pytest.mark.parametrize("phase", ["labelling", "reading"])
def test_a_worker_that_hangs_is_named_and_replaced_and_the_run_is_complete(
    phase: str, write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    # — fewer than 257 shards would be read by the driver
    shard_bytes = 20_000 if phase == "labelling" else 3_000
    spec = write_spec(input=write_many(tmp_path, 2_000, shard_bytes=shard_bytes))
    corpus = tmp_path / "many.jsonl"
    place = "document d1000" if phase == "labelling" else f"reading {corpus}"
    run = Logged(spec, stall_limit_s=12, ASSAY_FAULT=f"{place}=wait:{tmp_path / 'hung'}")
    assert run.end() == 0, run.lines
    (ended,) = [line for line in run.lines if line.endswith("it is ended, and Ray starts another")]
    shard = re.escape(f"it is {phase} {corpus}: rows ")
    assert re.search(rf"process \d+ on .* has shown no sign of life for .*{shard}", ended), ended
    assert_every_row_once(tmp_path / "out", 2_000)
