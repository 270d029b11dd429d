"""The driver's view of a run: its phase, its progress, and workers that stopped answering.

Entry point: `Watch`. It reads the workers' reports (`progress`) once a second on a thread of its
own. If the reports are lost, the run continues, and progress counts committed shards.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isfinite
from types import FrameType, TracebackType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from pipeline.errors import StalledError
from pipeline.ledger.blocks import ShardCounts
from pipeline.runtime.connection import is_alive
from pipeline.runtime.job import Plan
from pipeline.runtime.metrics import RunMetrics
from pipeline.runtime.outcome import failed_rows
from pipeline.runtime.progress import (
    LABELLING,
    READING,
    WORKER_PHASES,
    Mailbox,
    Progress,
    WorkerReport,
    WorkKey,
    work_key,
)
from pipeline.runtime.ray_processes import Services, own_services

logger = logging.getLogger(__name__)

POLL_S = 1.0
MAILBOX_TIMEOUT_S = 5.0
# Multiples of a worker's slowest batch: the worker is named after the first. The run ends after the
# second at the earliest.
_NAMED_AFTER, _ENDED_AFTER = 5, 10


# Rows with a status, rows that failed, rows that the model read, rows by their cost.
Counts = tuple[int, int, int, float]


class Watch:
    """Announces what a run does, at each change and every second, until it is closed.

    Args:
        announce: Takes the progress. Two threads call it, one at a time.
        stall_limit_s: Seconds without an answer from a worker at work that end the run.
    """

    def __init__(self, announce: Callable[[Progress], None], *, stall_limit_s: float) -> None:
        self._announce = announce
        self._changing = threading.Lock()  # held while the counts change or are announced
        self._phase = ""
        # — by phase, before there are metrics
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._entered_s = time.monotonic()
        self._plan: Plan | None = None
        self._documents = 0  # of the plan's work
        self._committed: Counts = (0, 0, 0, 0.0)  # of all committed shards
        self._committed_work: set[WorkKey] = set()
        self._kept = 0  # rows of the committed files: of a slice, those inside
        self._at_work: dict[WorkKey, WorkerReport] = {}
        self._watchdog = Watchdog(stall_limit_s)
        self._stall_limit_s = stall_limit_s
        self._stopped_s: float | None = None  # when a process of Ray was first seen stopped
        self._polling = threading.Lock()  # held while the mailbox is read
        self._mailbox: Any = None
        self._services = Services()
        self._metrics: RunMetrics | None = None
        self._error: StalledError | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="watch", daemon=True)
        # — only the main thread takes signals; from another, `run` names stalled workers
        self._main = threading.get_ident() if _in_main_thread() else None

    def __enter__(self) -> Watch:
        # — a stalled run is ended by SIGINT, which a shell's background job ignores
        if self._main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_interrupt)
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._thread.join()
        if self._main and signal.getsignal(signal.SIGINT) == self._on_interrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._error is not None and isinstance(error, KeyboardInterrupt):
            raise self._error from None

    def enter(self, phase: str, plan: Plan | None = None) -> None:
        """Announces a phase, and the plan once it is known."""
        with self._changing:
            self._count_seconds()
            self._phase = phase
            if plan is not None:
                self._plan, self._documents = plan, plan.work_rows
                # — another plan counts its own work
                self._committed, self._kept = (0, 0, 0, 0.0), 0
                self._committed_work.clear()
                self._at_work.clear()
            self._announce(self._progress())

    def read(self, rows: int) -> None:
        """Announces that the texts of `rows` more documents are read."""
        with self._changing:
            self._committed = _added(self._committed, (rows, 0, 0, rows))
            self._announce(self._progress())

    def committed(self, counts: ShardCounts) -> None:
        """Announces one more committed shard."""
        key = work_key(counts.sid, counts.labels)
        with self._changing:
            self._phase = LABELLING
            rows = counts.rows + counts.outside
            read = max((cost.asked_rows for cost in counts.costs.values()), default=0)
            more = rows, failed_rows(counts), read, rows
            self._committed = _added(self._committed, more)
            self._kept += counts.rows
            self._committed_work.add(key)
            self._at_work.pop(key, None)
            self._watchdog.forget(key)
            if self._metrics is not None:
                self._metrics.committed(counts)
            self._announce(self._progress())

    @contextmanager
    def mailbox(self, spec: str, plan: Plan) -> Iterator[Any]:
        """The handle of a new mailbox, which is read inside the block; None without Ray.

        Inside the block, the run's metrics are counted, too, under the name of the spec.
        """
        if not ray.is_initialized():
            yield None
            return
        self._count_seconds()
        self._metrics = RunMetrics(spec, plan)
        for phase, seconds in self._seconds.items():
            self._metrics.add_seconds(phase, seconds)
        # — if the mailbox's node is lost, a new mailbox gets each worker's next report
        actor = ray.remote(num_cpus=0, max_restarts=-1)(Mailbox)
        self._services, self._mailbox = own_services(), actor.remote()
        try:
            yield self._mailbox
        finally:
            with self._polling, self._changing:
                # — the last documents: after an error too, and before Ray ends
                self._metrics.tick(self._progress(), 0.0)
                self._mailbox = self._metrics = None

    def take_in(self, reports: Iterable[WorkerReport], now_s: float) -> None:
        """Adds workers' reports to the progress, which is announced within a second."""
        with self._changing:
            for report in reports:
                if report.phase != READING and _order(report.phase) > _order(self._phase):
                    self._phase = report.phase
                # — reports and commits arrive on different ways, in any order
                committed = report.work in self._committed_work
                if report.work is not None and report.phase != READING and not committed:
                    self._at_work[report.work] = report
                self._watchdog.hear(report, now_s, committed=committed)

    def _count_seconds(self) -> None:
        """Counts the time since the phase began; after that, `RunMetrics.tick` counts."""
        now_s = time.monotonic()
        self._seconds[self._phase or "starting"] += now_s - self._entered_s
        self._entered_s = now_s

    def _progress(self) -> Progress:
        counts = self._committed
        for each in self._at_work.values():
            counts = _added(counts, (each.answered, each.failed, each.read, each.work_done))
        answered, failed, read, work_done = counts
        return Progress(
            self._phase,
            self._plan,
            documents=self._documents,
            answered=answered,
            failed=failed,
            read=read,
            work_done=work_done,
            committed=self._kept,
        )

    def _poll(self) -> None:
        last_s = time.monotonic()
        while not self._closed.wait(POLL_S):
            with self._polling:
                if self._mailbox is not None:
                    self._read(self._mailbox)
            now_s = time.monotonic()
            with self._changing:
                progress = self._progress()
                if self._metrics is not None:
                    self._metrics.tick(progress, now_s - last_s)
                self._announce(progress)
            last_s = now_s

    def _read(self, mailbox: Any) -> None:
        if ended := self._services.ended:
            self._end(
                f"Ray's {ended[0]} has ended (the system may have killed it for its memory). Run "
                f"the same command again: finished shards are kept"
            )
            return  # nobody would answer
        if self._is_stopped(time.monotonic()):
            return
        try:
            reports = ray.get(mailbox.take.remote(), timeout=MAILBOX_TIMEOUT_S)
        except (GetTimeoutError, RayError):  # without reports, a silent worker may be healthy
            with self._changing:
                self._watchdog.excuse(time.monotonic())
            return
        now_s = time.monotonic()
        self.take_in(reports, now_s)
        with self._changing:
            stalls = list(self._watchdog.stalls(now_s, _is_alive))
        for stall in stalls:
            if not stall.ends:
                end = f"; the run ends at {stall.limit_s:.0f} s" if isfinite(stall.limit_s) else ""
                logger.warning("%s%s", stall, end)
            else:
                self._end(
                    f"{stall}. Look at that machine, then run the same command again: finished "
                    f"shards are kept. --stall-limit SECONDS gives workers more time"
                )

    def _is_stopped(self, now_s: float) -> bool:
        """Whether a process of Ray is stopped: it is named, and ends the run after the limit."""
        stopped = self._services.stopped
        if not stopped:
            self._stopped_s = None
            return False
        ((pid, name), *_) = stopped.items()
        place = f"Ray's {name} (process {pid})"
        if self._stopped_s is None:
            self._stopped_s = now_s
            limit = f"the run ends in {self._stall_limit_s:.0f} s"
            text = "%s is stopped by a signal; `kill -CONT %d` continues it; %s"
            logger.warning(text, place, pid, limit)
        elif now_s - self._stopped_s >= self._stall_limit_s:
            again = "Run the same command again: finished shards are kept"
            self._end(f"{place} was stopped by a signal and did not continue. {again}")
        return True

    def _end(self, message: str) -> None:
        """Ends the run with this error, once; in another thread than the main one, logs it."""
        if self._error is not None:
            return
        self._error = StalledError(message)
        if self._main is None:
            logger.warning("%s", message)
        else:
            signal.pthread_kill(self._main, signal.SIGINT)

    def _on_interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        if self._error is not None:
            raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class Stall:
    """A worker that has answered nothing for too long."""

    report: WorkerReport  # its last one
    silent_s: float
    limit_s: float  # the run ends after this silence

    @property
    def ends(self) -> bool:
        """Whether the run ends."""
        return self.silent_s >= self.limit_s

    def __str__(self) -> str:
        report, seconds = self.report, f"{self.silent_s:.0f} s"
        if self.limit_s == inf:
            return f"{report.worker} has been reading {report.place} for {seconds}"
        if report.work is None:
            last = f"its last report is: {report.phase}"
        elif report.finished:
            last = f"it has finished {report.place}"
        elif report.phase == READING:
            last = f"it reads {report.place}"
        else:
            last = f"it labels {report.place} ({report.answered:,} rows are answered)"
        return f"{report.worker} has answered nothing for {seconds}; {last}"


@dataclass(slots=True)
class _Heard:
    """The last report of a worker."""

    report: WorkerReport
    came_s: float  # when it, or a repetition of it, came last
    new_s: float  # when it came first
    at_work: bool  # whether the worker should soon report something else


class Watchdog:
    """Knows when each worker answered last, and how long it may take by its own slowest batch."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._heard: dict[str, _Heard] = {}  # by worker
        self._named: set[str] = set()  # workers

    def hear(self, report: WorkerReport, now_s: float, *, committed: bool = False) -> None:
        """Notes a report. A worker without work repeats its last one, and no other is expected."""
        heard = self._heard.get(report.worker)
        if heard is not None and heard.report == report:
            heard.came_s = now_s
            return
        at_work = report.work is not None and not report.finished and not committed
        if report.work is not None and at_work:  # a shard whose worker died is at work in another
            self.forget(report.work)
        self._named.discard(report.worker)
        self._heard[report.worker] = _Heard(report, now_s, now_s, at_work)

    def forget(self, work: WorkKey) -> None:
        """Expects no other report about this work any more."""
        for heard in self._heard.values():
            if heard.report.work == work:
                heard.at_work = False

    def excuse(self, now_s: float) -> None:
        """Restarts the clock of each worker, because reports may have been lost."""
        for heard in self._heard.values():
            heard.came_s = heard.new_s = now_s

    def stalls(self, now_s: float, is_alive: Callable[[WorkerReport], bool]) -> Iterator[Stall]:
        """The workers to name now, each once, and those for which the run ends."""
        for worker, heard in list(self._heard.items()):
            due = [
                stall
                for stall, named_after_s in self._silences(heard, now_s)
                if stall.silent_s >= named_after_s
            ]
            due = [stall for stall in due if stall.ends] or due
            if not due or (worker in self._named and not due[0].ends):
                continue
            if not is_alive(heard.report):
                del self._heard[worker]  # Ray starts it again, and then it reports
                continue
            self._named.add(worker)
            yield due[0]

    def _silences(self, heard: _Heard, now_s: float) -> Iterator[tuple[Stall, float]]:
        """How long the worker has been silent, and after how many seconds it is named for that."""
        report = heard.report
        # — without a repetition its process is stopped, or its machine cannot be reached
        yield Stall(report, now_s - heard.came_s, self._limit_s), self._limit_s / 2
        if not heard.at_work:
            return
        silent_s = now_s - heard.new_s
        if report.phase == READING:  # the last rows of a large compressed file take long
            yield Stall(report, silent_s, inf), self._limit_s / 2
        elif report.slowest_s is None:  # its first batch, whose duration nobody knows
            yield Stall(report, silent_s, self._limit_s), self._limit_s / 2
        else:
            limit_s = max(self._limit_s, _ENDED_AFTER * report.slowest_s)
            named_after_s = max(self._limit_s / 10, _NAMED_AFTER * report.slowest_s)
            yield Stall(report, silent_s, limit_s), named_after_s


def _added(a: Counts, b: Counts) -> Counts:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


def _order(phase: str) -> int:
    """The position of a worker's phase. Other phases come last: no worker's phase replaces them."""
    return WORKER_PHASES.index(phase) if phase in WORKER_PHASES else len(WORKER_PHASES)


def _is_alive(report: WorkerReport) -> bool:
    """Whether the worker's process runs, or is stopped, as far as Ray knows."""
    return is_alive(report.actor_id, report.pid)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
