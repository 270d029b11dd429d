"""The parts of a benchmark stay within the time, and each ends alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.parts import Ended, Part, in_process, in_turn

PARTS = [Part("a", least_s=10, most_s=60), Part("b", least_s=40, most_s=60), Part("c", 5, 60)]


def test_a_part_gets_what_is_left_and_one_that_needs_more_is_named() -> None:
    now_s = 0.0

    def run(part: str, limit_s: float) -> Iterator[tuple[str, float]]:
        nonlocal now_s
        yield part, limit_s
        now_s += limit_s

    results = in_turn(PARTS, run, budget_s=90, clock=lambda: now_s)
    not_started = Ended("b", "not started: 30 s are left and it needs 40 s")
    assert list(results) == [("a", 60), not_started, ("c", 30)]


def test_what_a_process_measured_comes_back_in_order() -> None:
    assert list(in_process(str.split, "one two", 60)) == ["one", "two"]


def test_an_error_in_a_process_is_named() -> None:
    [ended] = in_process(int, "part", 60)
    assert ended == Ended("part", "ValueError: invalid literal for int() with base 10: 'part'")


def test_a_killed_process_is_named() -> None:
    [ended] = in_process(os.system, "kill -9 $PPID", 60)
    assert ended == Ended("kill -9 $PPID", "its process ended with exit code -9")


def test_a_process_ends_with_its_limit_and_its_own_processes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.parts.GRACE_S", 0.5)
    pid, start_s = tmp_path / "pid", time.monotonic()
    command = f"echo $$ > {pid}; sleep 60"
    assert list(in_process(os.system, command, 5)) == [Ended(command, "ended by its limit of 5 s")]
    assert time.monotonic() - start_s < 30
    # — a machine that is very busy may not have started the command, or takes a while to end it
    while pid.exists() and is_running(int(pid.read_text())):
        assert time.monotonic() - start_s < 30, f"process {pid.read_text()} still runs"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether the process is there; one that is over may still wait for its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
