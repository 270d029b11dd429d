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
from collections.abc import Callable
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
    LOAD_PHASES,
    READING,
    STARTING_WORKERS,
    WAITING,
    Send,
    WorkerReport,
    ignore,
)

# A worker without a sign of life for so long ends itself, and a run in which no worker reports.
STALL_LIMIT_S = 600.0
# A worker repeats its last report this often: one that repeats nothing is stopped, or cut off.
REPEAT_S = 1.0
# The mailbox takes in about 3,600 reports a second (one core of a Xeon). More workers than this
# send their last report less often, and nothing between.
REPORTS_A_SECOND = 1_000
ANSWER_TIMEOUT_S = 5.0
# Outside of batches, a process is alive if it uses this share of a core, or moves as many bytes a
# second.
_ALIVE_SHARE, _ALIVE_BYTES = 0.05, 64 * 1024


@dataclass(frozen=True, slots=True)
class Letter:
    """A report and its sender."""

    report: WorkerReport
    worker: str = ""  # process and node, for people
    node_id: str = ""
    loads: bool = False  # whether it is one of the workers that load a model
    cause: AssayError | None = None  # why it ends, or why it cannot load a model
    ended: bool = False  # it ends itself: this is its last report


class Mailbox:
    """Keeps the latest report of each worker about each shard until the driver takes it."""

    def __init__(self) -> None:
        self._latest: dict[object, Letter] = {}
        # Of the workers that load or fail: the last report of each or its failure; when it came.
        self._loading: dict[str, tuple[Letter, float]] = {}

    def put(self, letter: Letter) -> None:
        """Keeps the report in place of the worker's earlier one about the same shard.

        A failure is kept until the driver has taken it.
        """
        key = letter.worker, letter.report.work
        before = self._latest.pop(key, letter)  # — the order is that of the latest reports
        self._latest[key] = letter if before.cause is None else before
        known = self._loading.get(letter.worker)
        if (letter.loads or letter.cause) and (known is None or known[0].cause is None):
            self._loading[letter.worker] = letter, time.monotonic()

    def others_can_label(self, engines: int, alive_s: float) -> bool | None:
        """Whether some worker has loaded its model; None if one may still do so.

        A worker is alive if it reported in the last `alive_s` seconds. For as long, those of the
        `engines` that have never reported may still start.
        """
        now_s = time.monotonic()
        failed_s = [came_s for letter, came_s in self._loading.values() if letter.cause]
        alive = [
            letter.report.phase
            for letter, came_s in self._loading.values()
            if letter.cause is None and now_s - came_s < alive_s
        ]
        if any(phase not in LOAD_PHASES for phase in alive):
            return True
        starts = len(self._loading) < engines and now_s - min(failed_s, default=now_s) < alive_s
        return None if alive or starts else False

    def left_out(self) -> dict[str, AssayError]:
        """By the id of a node, why a worker could not load there."""
        failed = [letter for letter, _ in self._loading.values() if not letter.ended]
        return {letter.node_id: letter.cause for letter in failed if letter.cause is not None}

    def take(self) -> list[Letter]:
        """The reports since the last call, the oldest first."""
        latest, self._latest = self._latest, {}
        return list(latest.values())


class Inbox:
    """The driver's end of a mailbox, until it is closed."""

    def __init__(self) -> None:
        import ray

        # — if the mailbox's node is lost, a new mailbox gets each worker's next report
        self.mailbox: Any = ray.remote(num_cpus=0, max_restarts=-1)(Mailbox).remote()
        self._taking = threading.Lock()  # so that nobody asks Ray after its end
        self._closed = False

    def take(self) -> list[Letter]:
        """The reports since the last call; none from a mailbox that does not answer."""
        import ray

        with self._taking, suppress(ray.exceptions.GetTimeoutError, ray.exceptions.RayError):
            if not self._closed:
                asked = self.mailbox.take.remote()
                letters: list[Letter] = ray.get(asked, timeout=ANSWER_TIMEOUT_S)
                return letters
        return []

    def close(self) -> None:
        """Waits for a call of `take`; those that follow get nothing."""
        with self._taking:
            self._closed = True


@dataclass(frozen=True, slots=True)
class Post:
    """Where workers report, and for how long one may show no sign of life."""

    mailbox: Any  # the handle of an actor `Mailbox`
    stall_limit_s: float = STALL_LIMIT_S
    workers: int = 1  # that report
    engines: int = 0  # that load a model, in the stage that has this post; 0: it loads none

    @property
    def repeat_s(self) -> float:
        """How often a worker repeats its last report."""
        return max(REPEAT_S, min(self.workers / REPORTS_A_SECOND, self.stall_limit_s / 10))

    def others_can_label(self) -> bool:
        """Whether another worker has loaded its model; waits for those that may still do so."""
        import ray

        alive_s, able = 10 * self.repeat_s, None
        while able is None:
            time.sleep(0.1)
            asked = self.mailbox.others_can_label.remote(self.engines, alive_s)
            able = ray.get(asked, timeout=ANSWER_TIMEOUT_S)
        return bool(able)


class Silence:
    """How long a process has shown no sign of life.

    While it labels, a sign of life is a report of another batch: a GPU that hangs keeps a core
    busy. In other phases it is work of the process: processor time, or bytes moved.
    """

    def __init__(self, now_s: float) -> None:
        self._report: WorkerReport | None = None
        self._sign_s = now_s
        self._works: dict[bool, tuple[float, float]] = {}  # last counts, by `machine`

    def seconds(
        self, report: WorkerReport, now_s: float, work: Callable[[bool], tuple[float, float]]
    ) -> float:
        """The seconds until now, after a second with this report. `work` is `work_done`."""
        of_machine = report.phase in (FETCHING, CONVERTING)
        cpu_s, moved = work(of_machine)
        before = self._works.get(of_machine, (cpu_s, moved))
        self._works[of_machine] = cpu_s, moved
        works = cpu_s - before[0] >= _ALIVE_SHARE or moved - before[1] >= _ALIVE_BYTES
        is_new, self._report = report != self._report, report
        if is_new or report.phase == WAITING or (works and report.phase != LABELLING):
            self._sign_s = now_s
        return now_s - self._sign_s


def work_done(of_machine: bool) -> tuple[float, float]:
    """Processor seconds of this process without this thread, and bytes that it moved.

    Engines of a machine wait for the one that fetches or converts the model: with `of_machine` the
    bytes are those of all processes.
    """
    moved = 0
    with suppress(OSError, psutil.Error, AttributeError):  # — of Linux alone
        own = psutil.Process().io_counters()
        moved = own.read_chars + own.write_chars + own.read_bytes
        if of_machine:
            moved += psutil.net_io_counters().bytes_recv
            disks = psutil.disk_io_counters()
            moved += disks.read_bytes + disks.write_bytes if disks else 0
    return time.process_time() - time.thread_time(), moved


@cache
def sender(post: Post | None) -> Send:
    """Sends this process's reports to the mailbox, and waits for nothing.

    A thread repeats the latest report, from now until the process ends. After the limit without a
    sign of life it kills the process, and Ray starts another and gives it the work. Without a
    mailbox (None) nobody reads the reports.
    """
    if post is None:
        return ignore
    import ray

    pid, node = os.getpid(), ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    own = f"process {pid} on {node}", ray.get_runtime_context().get_node_id(), post.engines > 0
    latest = WorkerReport(STARTING_WORKERS)
    sending = threading.Lock()  # a repeated report must not arrive after a later one
    over = threading.Event()

    def send(
        report: WorkerReport | None = None, cause: AssayError | None = None, *, ended: bool = False
    ) -> Any:
        nonlocal latest
        with sending:
            # — of a shard beside one that is labelled, or a GPU that hangs would not be noticed
            is_label = latest.phase == LABELLING and report and latest.work != report.work
            if is_label and report and report.phase in (READING, COMMITTING):
                return None
            latest = latest if report is None else report
            if report is not None and post.repeat_s > REPEAT_S:
                return None  # the thread sends it
            return post.mailbox.put.remote(Letter(latest, *own, cause, ended))

    def repeat() -> None:
        silence = Silence(time.monotonic())
        while not over.wait(post.repeat_s):
            # — ends the process from C where a thread keeps Python's lock
            faulthandler.dump_traceback_later(post.stall_limit_s, exit=True, file=nowhere)
            is_over = silence.seconds(latest, time.monotonic(), work_done) >= post.stall_limit_s
            last = send(ended=is_over)
            if is_over:
                with suppress(ray.exceptions.RayError):
                    ray.get(last, timeout=REPEAT_S)
                os.kill(pid, signal.SIGKILL)

    nowhere = os.open(os.devnull, os.O_WRONLY)
    send()
    atexit.register(faulthandler.cancel_dump_traceback_later)
    atexit.register(over.set)
    threading.Thread(target=repeat, name="report", daemon=True).start()
    return send
