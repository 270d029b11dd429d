"""What a run does at this moment: the reports of its workers, and their sum for people.

Entry points: `LabelProgress`, with which a worker reports, and `Mailbox`, the actor from which the
driver takes the reports. A worker that shows no sign of life ends itself (`sender`), and Ray starts
another. Must import neither torch nor Arrow, because the mailbox is a process, which should be
small.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import psutil

from pipeline.errors import AssayError

if TYPE_CHECKING:
    from pipeline.ledger.cells import WorkItem
    from pipeline.runtime.plan import Plan

logger = logging.getLogger(__name__)

# A worker sends at most two reports a second, even if its batches are faster.
REPORT_S = 0.5
# A worker repeats its last report this often: one that repeats nothing is stopped, or cut off.
REPEAT_S = 1.0
# The mailbox takes in about 3,600 reports a second (one core of a Xeon). More workers than this
# send their last report less often, and nothing between.
REPORTS_A_SECOND = 1_000
CLOCK_TIMEOUT_S = 5.0
# Outside of batches, a process is alive if it uses this share of a core, or moves as many bytes a
# second.
_ALIVE_SHARE, _ALIVE_BYTES = 0.05, 64 * 1024
# Multiples of the slowest batch: a worker is named after the first, and ended after the second, but
# not before the limit.
_NAMED_AFTER, _ENDED_AFTER = 5, 10

LOCATING = "locating the model"
LISTING = "listing the input"
STARTING_RAY = "starting Ray"
CONNECTING = "connecting to Ray"
CONVERTING = "converting the model"
FETCHING = "fetching the model"
CHECKING = "checking the model"  # only of `pull`
READING_TEXTS = "reading new texts"
STARTING_WORKERS = "starting the workers"
LOADING = "loading the model"
LABELLING = "labelling"
PUBLISHING = "publishing"
MEASURING = "measuring the speed"  # of `plan`
COMPARING = "comparing the answers with those of separate prompts"  # of `check`
# Phases of a worker, which the run as a whole does not have.
WAITING = "waiting for work"
READING = "reading"
COMMITTING = "committing"
LOAD_PHASES = (STARTING_WORKERS, FETCHING, CONVERTING, LOADING)
# In their order: a later phase replaces an earlier one.
WORKER_PHASES = (*LOAD_PHASES, LABELLING)
# In which the driver itself works; in the others it waits for workers, or for Ray, which has limits
# of its own for its start.
DRIVER_PHASES = (LOCATING, LISTING)

WorkKey = tuple[str, tuple[str, ...]]  # shard id and sorted tasks of a work item


def work_key(sid: str, tasks: Iterable[str]) -> WorkKey:
    """The key of a work item in reports: a shard may have several work items."""
    return sid, tuple(sorted(tasks))


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one worker does."""

    phase: str
    worker: str = ""  # process and node, for people
    actor_id: str = ""
    pid: int = 0
    work: WorkKey | None = None  # None: no shard is at work
    place: str = ""  # of the shard: file and rows
    answered: int = 0  # rows of the shard; those that the model does not read count at its end
    read: int = 0  # rows of those that the model read
    work_done: float = 0.0  # rows by their cost: half of the shard's tokens are half of its rows
    failed: int = 0  # of those
    slowest_s: float | None = None  # the longest time between two batches; None: no batch yet
    silent_s: float = 0.0  # since its last sign of life
    ended: bool = False  # it ends itself: this is its last report
    batches: int = 0  # of all shards
    cause: AssayError | None = None  # why it ends, or why it cannot load a model
    node_id: str = ""
    loads: bool = False  # whether it is one of the workers that load a model

    def limits(self, limit_s: float) -> tuple[float, float]:
        """After how many silent seconds the worker is named, and after how many it is ended."""
        if self.phase != LABELLING or self.slowest_s is None:
            return limit_s / 2, limit_s
        named_after_s = max(limit_s / 10, _NAMED_AFTER * self.slowest_s)
        return named_after_s, max(limit_s, _ENDED_AFTER * self.slowest_s)


Send = Callable[..., Any]  # takes a report, or changes of the latest one, which are sent at once


def ignore(_report: object, **_changes: object) -> None:
    """Takes a report that nobody reads."""


class Display:
    """What only shows a run, such as its progress: its errors never end the run.

    Args:
        name: What it is, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._failed = False

    def __call__(self, show: Callable[..., object], *values: object) -> None:
        """Calls `show`. The first error is logged, and nothing is called after it."""
        if self._failed:
            return
        try:
            show(*values)
        except Exception as error:
            self._failed = True
            text = "%s cannot be shown any more, and the run goes on: %s: %s"
            logger.warning(text, self._name, type(error).__name__, error)


def work_report(phase: str, work: WorkItem) -> WorkerReport:
    """The report of a worker that begins with a shard."""
    piece = work.shard.piece
    place = f"{work.shard.path}: rows {piece.start_row} to {piece.end_row}"
    return WorkerReport(phase, work=work_key(work.shard.id, work.tasks), place=place)


class LabelProgress:
    """Reports to `send` that a shard is labelled, of which the model reads at most `rows` rows."""

    def __init__(self, send: Send, work: WorkItem, rows: int) -> None:
        self._send, self._rows = send, rows
        self._last_sent_s = self._last_batch_s = time.monotonic()
        self._report = work_report(LABELLING, work)
        self._send(self._report)

    def advance(self, answered: int, share: float) -> None:
        """Reports one more batch: the last of `answered` rows, and a share of the shard's cost."""
        now_s = time.monotonic()
        slowest_s = max(self._report.slowest_s or 0.0, now_s - self._last_batch_s)
        self._last_batch_s = now_s
        self._report = replace(
            self._report,
            answered=self._report.answered + answered,
            read=self._report.read + answered,
            work_done=self._report.work_done + share * self._rows,
            slowest_s=slowest_s,
            batches=self._report.batches + 1,
        )
        if now_s - self._last_sent_s >= REPORT_S:
            self._last_sent_s = now_s
            self._send(self._report)

    def finish(self, rows: int, failed: int) -> None:
        """Reports that the shard is labelled, with the rows that the model did not read."""
        self._send(replace(self._report, answered=rows, failed=failed, work_done=rows))


class Mailbox:
    """Keeps the latest report of each worker about each shard until the driver takes it."""

    def __init__(self) -> None:
        self._latest: dict[object, WorkerReport] = {}
        # Of the workers that load or fail: the last report of each or its failure; when it came.
        self._loading: dict[str, tuple[WorkerReport, float]] = {}
        self._ahead_s: float | None = None  # the driver's clock, of this machine's

    def put(self, report: WorkerReport) -> None:
        """Keeps the report in place of the worker's earlier one about the same shard.

        A failure is kept until the driver has taken it.
        """
        key = report.worker, report.work
        before = self._latest.pop(key, report)  # — the order is that of the latest reports
        self._latest[key] = report if before.cause is None else before
        known = self._loading.get(report.worker)
        if (report.loads or report.cause) and (known is None or known[0].cause is None):
            self._loading[report.worker] = report, time.monotonic()

    def others_can_label(self, engines: int, alive_s: float) -> bool | None:
        """Whether some worker has loaded its model; None if one may still do so.

        A worker is alive if it reported in the last `alive_s` seconds. For as long, those of the
        `engines` that have never reported may still start.
        """
        now_s = time.monotonic()
        failed_s = [came_s for report, came_s in self._loading.values() if report.cause]
        alive = [
            report.phase
            for report, came_s in self._loading.values()
            if report.cause is None and now_s - came_s < alive_s
        ]
        if any(phase not in LOAD_PHASES for phase in alive):
            return True
        starts = len(self._loading) < engines and now_s - min(failed_s, default=now_s) < alive_s
        return None if alive or starts else False

    def left_out(self) -> dict[str, AssayError]:
        """By the id of a node, why a worker could not load there."""
        failed = [r for r, _ in self._loading.values() if not r.ended]
        return {report.node_id: report.cause for report in failed if report.cause is not None}

    def driver_clock(self) -> float | None:
        """The time by the driver's clock; None before the driver took reports."""
        return None if self._ahead_s is None else time.time() + self._ahead_s

    def take(self, now_s: float) -> list[WorkerReport]:
        """The reports since the last call, the oldest first; `now_s` is the driver's time."""
        self._ahead_s = now_s - time.time()
        latest, self._latest = self._latest, {}
        return list(latest.values())


@dataclass(frozen=True, slots=True)
class Post:
    """Where workers report, and for how long one may show no sign of life."""

    mailbox: Any  # the handle of an actor `Mailbox`
    stall_limit_s: float
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
            able = ray.get(asked, timeout=CLOCK_TIMEOUT_S)
        return bool(able)

    def on_this_clock(self, moment_s: float) -> float:
        """A moment of the driver's clock, by this machine's; the same if that is not known."""
        import ray

        now_s = None
        with suppress(ray.exceptions.RayError):
            now_s = ray.get(self.mailbox.driver_clock.remote(), timeout=CLOCK_TIMEOUT_S)
        return moment_s if now_s is None else moment_s + time.time() - now_s


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

    node, pid = ray.util.get_node_ip_address(), os.getpid()  # type: ignore[no-untyped-call]
    context = ray.get_runtime_context()
    actor_id, node_id = context.get_actor_id() or "", context.get_node_id()
    latest = WorkerReport(STARTING_WORKERS)
    sending = threading.Lock()  # a repeated report must not arrive after a later one
    ended = threading.Event()

    def send(report: WorkerReport | None = None, **changes: Any) -> Any:
        nonlocal latest
        with sending:
            # — of a shard beside one that is labelled, or a GPU that hangs would not be noticed
            is_label = latest.phase == LABELLING and report and latest.work != report.work
            if is_label and report and report.phase in (READING, COMMITTING):
                return None
            latest = latest if report is None else report
            if report is not None and post.repeat_s > REPEAT_S:
                return None  # the thread sends it
            own = replace(latest, worker=f"process {pid} on {node}", actor_id=actor_id, pid=pid)
            own = replace(own, node_id=node_id, loads=post.engines > 0)
            return post.mailbox.put.remote(replace(own, **changes))

    def repeat() -> None:
        silence = Silence(time.monotonic())
        while not ended.wait(post.repeat_s):
            # — ends the process from C where a thread keeps Python's lock
            faulthandler.dump_traceback_later(post.stall_limit_s, exit=True, file=nowhere)
            silent_s = silence.seconds(latest, time.monotonic(), work_done)
            is_over = silent_s >= latest.limits(post.stall_limit_s)[1]
            last = send(silent_s=silent_s, ended=is_over)
            if is_over:
                with suppress(ray.exceptions.RayError):  # without it, the driver sees the silence
                    ray.get(last, timeout=REPEAT_S)
                os.kill(pid, signal.SIGKILL)

    nowhere = os.open(os.devnull, os.O_WRONLY)
    send()
    atexit.register(faulthandler.cancel_dump_traceback_later)
    atexit.register(ended.set)
    threading.Thread(target=repeat, name="report", daemon=True).start()
    return send


@dataclass(frozen=True, slots=True)
class Progress:
    """What a run does at one moment."""

    phase: str
    """What is being done, such as `loading the model`."""
    plan: Plan | None = None
    """What is there and what is missing; None before it is known."""
    documents: int = 0
    """Documents of all work items; 0 before the plan is known."""
    answered: int = 0
    """Documents with a status: read by the model, reused, empty or failed."""
    failed: int = 0
    """Documents of those that failed."""
    read: int = 0
    """Documents of those that the model read."""
    work_done: float = 0.0
    """Documents by their cost, for the time left: workers read long documents first."""
    committed: int = 0
    """Documents of finished shards, which a later run does not label again."""

    @property
    def counts(self) -> bool:
        """Whether documents are counted in this phase."""
        return self.phase in (READING_TEXTS, LABELLING)

    @property
    def verb(self) -> str:
        """What happened to the documents that are counted."""
        return "read" if self.phase == READING_TEXTS else "labelled"
