"""Run the parts of a benchmark one after the other, each in a process of its own, in limited time.

Entry points: `in_turn` and `in_process`. An error, a lack of memory or a lack of time ends its part
alone, and what that part had measured by then is kept. Must not import torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

SPAWN = multiprocessing.get_context("spawn")
GRACE_S = 3.0  # for a process to end by itself, and again after it was killed

Measure = Callable[[str], Any]  # the part's name -> iterable of measurements


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a benchmark, and how long it may take."""

    name: str
    least_s: float  # with less time left, the part does not start
    most_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a part did not start, or ended before it had measured everything."""

    part: str
    reason: str


def in_turn(
    parts: Sequence[Part],
    run: Callable[[str, float], Iterable[object]],
    *,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[object]:
    """The measurements of all parts; `Ended` in place of a part for which too little time is left.

    Args:
        parts: The parts, the most important first.
        run: Gives the measurements of the named part, in at most the given seconds.
        budget_s: Seconds for all parts together.
        clock: The time in seconds.
    """
    ends_s = clock() + budget_s
    for part in parts:
        left_s = ends_s - clock()
        if left_s < part.least_s:
            needs = f"{max(left_s, 0):.0f} s are left and it needs {part.least_s:.0f} s"
            yield Ended(part.name, f"not started: {needs}")
        else:
            yield from run(part.name, min(left_s, part.most_s))


def in_process(measure: Measure, part: str, limit_s: float) -> Iterator[object]:
    """The measurements of a part, made by a new process that ends with the limit at the latest.

    `Ended` follows them if the part raised an error, was killed or needed more time.
    """
    receiver, sender = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_send, args=(measure, part, sender))
    stops_s = time.monotonic() + limit_s - 2 * GRACE_S
    process.start()
    sender.close()
    try:
        while receiver.poll(max(0.0, stops_s - time.monotonic())):
            yield receiver.recv()
        yield Ended(part, f"ended by its limit of {limit_s:.0f} s")
    except EOFError:  # — the process has closed its end: it is over, or about to be
        process.join(GRACE_S)
        if process.exitcode:
            yield Ended(part, f"its process ended with exit code {process.exitcode}")
    finally:
        _end(process)
        receiver.close()


def _send(measure: Measure, part: str, sender: Connection) -> None:
    os.setsid()  # — its own children end with it
    try:
        for measurement in measure(part):
            sender.send(measurement)
    except Exception as error:  # named in the report; other parts still run
        traceback.print_exc()
        sender.send(Ended(part, named(error)))
    finally:
        sender.close()


def named(error: Exception) -> str:
    """The error's class and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _end(process: SpawnProcess) -> None:
    """Ends the process and the processes that it started."""
    assert process.pid is not None, "the process was not started"
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        process.join(GRACE_S)
    if process.is_alive():  # — it had no group yet
        process.kill()
        process.join()
