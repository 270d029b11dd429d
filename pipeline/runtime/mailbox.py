"""How workers report to the driver, and end themselves when they show no sign of life.

Entry points: `sender` on a worker, and `Mailbox`, the actor from which the driver takes the
reports. Must import neither torch nor Arrow: the mailbox is a process, which should be small.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil

from pipeline.errors import AssayError
from pipeline.runtime.progress import (
    COMMITTING,
    CONVERTING,
    FETCHING,
    LABELLING,
    READING,
    STARTING_WORKERS,
    WAITING,
    Send,
    WorkerReport,
    ignore,
)

# A worker without a sign of life for so long ends itself, and a run in which no worker reports.
STALL_LIMIT_S = 600.0
# A worker sends its last report this often: one that sends nothing is stopped, or cut off.
REPEAT_S = 1.0
# The mailbox takes in about 3,600 reports a second (one core of a Xeon). More workers than this
# send their last report less often.
REPORTS_A_SECOND = 1_000
ANSWER_TIMEOUT_S = 5.0
# Outside of batches, a process is alive if it uses this share of a core, or moves as many bytes a
# second.
_ALIVE_SHARE, _ALIVE_BYTES = 0.05, 64 * 1024
# In these phases a process may wait for long: for work, or for another one that fetches the model.
_WAITS = (WAITING, FETCHING, CONVERTING)


@dataclass(frozen=True, slots=True)
class Letter:
    """A report and its sender."""

    report: WorkerReport
    worker: str = ""  # process and node, for people
    node_id: str = ""
    is_last: bool = False  # the worker ends itself
    cause: AssayError | None = None  # why it ends; None: it has shown no sign of life
    starts_again: bool = True  # Ray starts another; no worker can load on this node otherwise


class Mailbox:
    """Keeps the latest report of each worker, and the last ones, until the driver takes them."""

    def __init__(self) -> None:
        self._latest: dict[str, Letter] = {}
        self._ended: list[Letter] = []
        self._left_out: dict[str, AssayError] = {}

    def put(self, letter: Letter) -> None:
        """Keeps the report in place of the worker's earlier one, unless that was its last."""
        if not letter.is_last:
            self._latest.pop(letter.worker, None)  # — the order is that of the latest reports
            self._latest[letter.worker] = letter
            return
        self._ended.append(letter)
        if letter.cause is not None and not letter.starts_again:
            self._left_out[letter.node_id] = letter.cause

    def left_out(self) -> dict[str, AssayError]:
        """By the id of a node, why a worker could not load there."""
        return self._left_out

    def take(self) -> list[Letter]:
        """The reports since the last call; the last ones of workers that ended come last."""
        letters = [*self._latest.values(), *self._ended]
        self._latest, self._ended = {}, []
        return letters


@dataclass(frozen=True, slots=True)
class Post:
    """Where workers report, and for how long one may show no sign of life."""

    mailbox: Any  # the handle of an actor `Mailbox`
    stall_limit_s: float = STALL_LIMIT_S
    workers: int = 1  # that report
    unable: frozenset[str] = frozenset()  # ids of nodes that run no worker

    @property
    def repeat_s(self) -> float:
        """How often a worker sends its last report."""
        return max(REPEAT_S, min(self.workers / REPORTS_A_SECOND, self.stall_limit_s / 10))


class Silence:
    """How long a process has shown no sign of life.

    While it labels, a sign of life is a report of another batch: a GPU that hangs keeps a core
    busy. In other phases it is work of the process: processor time, or bytes moved.
    """

    def __init__(self, now_s: float) -> None:
        self._report: WorkerReport | None = None
        self._sign_s = now_s
        self._work = 0.0, 0.0

    def seconds(self, report: WorkerReport, now_s: float, work: tuple[float, float]) -> float:
        """The seconds until now, after a second with this report. `work` is `work_done`."""
        (cpu_s, moved), (cpu_before_s, moved_before) = work, self._work
        works = cpu_s - cpu_before_s >= _ALIVE_SHARE or moved - moved_before >= _ALIVE_BYTES
        is_new = report != self._report
        self._report, self._work = report, work
        if is_new or report.phase in _WAITS or (works and report.phase != LABELLING):
            self._sign_s = now_s
        return now_s - self._sign_s


def work_done() -> tuple[float, float]:
    """Processor seconds of this process without this thread, and bytes that it moved."""
    moved = 0
    with suppress(OSError, psutil.Error, AttributeError):  # — of Linux alone
        own = psutil.Process().io_counters()
        moved = own.read_chars + own.write_chars + own.read_bytes
    return time.process_time() - time.thread_time(), moved


class Sender:
    """Sends this process's reports to the mailbox; it waits until the last report is sent."""

    def __init__(self, post: Post) -> None:
        import ray

        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._own = f"process {os.getpid()} on {node}", ray.get_runtime_context().get_node_id()
        self._post = post
        self._latest = WorkerReport(STARTING_WORKERS)
        self._over = threading.Event()

    def __call__(self, report: WorkerReport) -> None:
        """Takes a report, which is sent within a second unless another one follows."""
        # — of the shard that is labelled: later reports of others would hide a GPU that hangs
        is_of_another_shard = self._latest.phase == LABELLING and report.work != self._latest.work
        if not (is_of_another_shard and report.phase in (READING, COMMITTING)):
            self._latest = report

    def end(self, cause: AssayError | None, *, starts_again: bool = True) -> None:
        """Sends the last report of a worker that ends itself, or cannot be used."""
        import ray

        with suppress(ray.exceptions.RayError):
            letter = Letter(self._latest, *self._own, True, cause, starts_again)
            ray.get(self._post.mailbox.put.remote(letter), timeout=ANSWER_TIMEOUT_S)

    def start(self) -> None:
        """Sends reports on a thread of its own, until the process ends."""
        atexit.register(faulthandler.cancel_dump_traceback_later)
        atexit.register(self._over.set)
        threading.Thread(target=self._repeat, name="report", daemon=True).start()

    def _repeat(self) -> None:
        silence, nowhere = Silence(time.monotonic()), os.open(os.devnull, os.O_WRONLY)
        limit_s = self._post.stall_limit_s
        while not self._over.wait(self._post.repeat_s):
            # — ends the process from C where a thread keeps Python's lock
            faulthandler.dump_traceback_later(limit_s, exit=True, file=nowhere)
            if silence.seconds(self._latest, time.monotonic(), work_done()) >= limit_s:
                self.end(None)
                os.kill(os.getpid(), signal.SIGKILL)
            self._post.mailbox.put.remote(Letter(self._latest, *self._own))


@cache
def sender(post: Post | None) -> Send:
    """Sends this process's reports to the mailbox, from now until the process ends.

    After the limit without a sign of life the process is killed, and Ray starts another and gives
    it the work. Without a mailbox (None) the reports are discarded.
    """
    if post is None:
        return ignore
    sends = Sender(post)
    sends.start()
    return sends
