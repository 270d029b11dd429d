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
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from pipeline.errors import AssayError, ModelError, StalledError
from pipeline.ledger.counts import ShardCounts
from pipeline.runtime.metrics import RunMetrics
from pipeline.runtime.plan import Plan
from pipeline.runtime.progress import (
    DRIVER_PHASES,
    LABELLING,
    WAITING,
    WORKER_PHASES,
    Display,
    Mailbox,
    Post,
    Progress,
    Silence,
    WorkerReport,
    WorkKey,
    work_done,
    work_key,
)
from pipeline.runtime.ray_processes import Services, own_services
from pipeline.runtime.stalls import DRIVER, Stall, Watchdog, is_worker_alive

logger = logging.getLogger(__name__)

POLL_S = 1.0
MAILBOX_TIMEOUT_S = 5.0
# What `--max-hours` leaves at least for the plan.
LEAST_PLANNING_S = 60.0

# Rows with a status, rows that failed, rows that the model read, rows by their cost.
Counts = tuple[int, int, int, float]


class Watch:
    """Announces what a run does, at each change and every second, until it is closed.

    Args:
        announce: Takes the progress. Two threads call it, one at a time.
        stall_limit_s: Seconds without a sign of life after which a worker is replaced, and after
            which the driver ends the run.
    """

    def __init__(self, announce: Callable[[Progress], None], *, stall_limit_s: float) -> None:
        self._announce = partial(Display("the progress"), announce)
        self._count = Display("the metrics of Ray")
        self._changing = threading.Lock()  # held while the counts change or are announced
        self._phase = ""
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by phase
        self._entered_s = time.monotonic()
        self._plan: Plan | None = None
        self._documents = 0  # of the plan's work
        self._committed: Counts = (0, 0, 0, 0.0)  # of all committed shards
        self._committed_work: set[WorkKey] = set()
        self._kept = 0  # rows of the committed files: of a slice, those inside
        self._at_work: dict[WorkKey, WorkerReport] = {}
        self._watchdog = Watchdog(stall_limit_s)
        self._stall_limit_s = stall_limit_s
        self._own = Silence(time.monotonic())  # of the driver
        self._bound: tuple[float, str] | None = None  # when planning must be over, and the option
        self._stopped_s: float | None = None  # when a process of Ray was first seen stopped
        self._polling = threading.Lock()  # held while the mailbox is read
        self._mailbox: Any = None
        self._services = Services()
        self._metrics: RunMetrics | None = None
        self._error: AssayError | None = None
        self._ending = threading.Lock()  # held while the run is ended, or closes
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="watch", daemon=True)
        # — only the main thread takes signals; from another, `run` names stalled workers
        is_main = threading.current_thread() is threading.main_thread()
        self._main = threading.get_ident() if is_main else None

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
        try:
            with self._ending:
                self._closed.set()
            self._thread.join()
        except KeyboardInterrupt:
            self._closed.set()
            self._thread.join()
            if self._error is None:
                raise
            # — the signal of `_end` came after the block: a block without an error has its result
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

    def limit_planning(self, ends: float, option: str) -> None:
        """Ends the run if it still plans at `ends`, but gives the plan a minute at least.

        `ends` is in seconds since the epoch; the error names the option.
        """
        self._bound = max(ends, time.time() + LEAST_PLANNING_S), option

    def read(self, rows: int) -> None:
        """Announces that the texts of `rows` more documents are read."""
        with self._changing:
            self._committed = _added(self._committed, (rows, 0, 0, rows))
            self._announce(self._progress())

    def committed(self, counts: ShardCounts) -> None:
        """Announces one more committed shard, or one that failed."""
        key = work_key(counts.sid, counts.tasks)
        if counts.error is not None:
            logger.warning("a shard failed, and the others go on: %s", counts.error)
            with self._changing:
                self._at_work.pop(key, None)
            return
        with self._changing:
            self._phase = LABELLING
            kept = counts.n.total_of("rows")
            rows = kept + counts.n["outside",]
            more = rows, counts.n.failed, counts.n.asked, rows
            self._committed = _added(self._committed, more)
            self._kept += kept
            self._committed_work.add(key)
            self._at_work.pop(key, None)
            self._watchdog.committed(key)
            if self._metrics is not None:
                self._count(self._metrics.committed, counts)
            self._announce(self._progress())

    @contextmanager
    def mailbox(self, spec: str, plan: Plan, workers: int) -> Iterator[Any]:
        """The post of the workers, which is read inside the block; None without Ray.

        Inside the block, the run's metrics are counted, too, under the name of the spec.
        """
        if not ray.is_initialized():
            yield None
            return
        self._count(self._open_metrics, spec, plan)
        # — if the mailbox's node is lost, a new mailbox gets each worker's next report
        actor = ray.remote(num_cpus=0, max_restarts=-1)(Mailbox)
        self._services, self._mailbox = own_services(), actor.remote()
        try:
            yield Post(self._mailbox, self._stall_limit_s, workers)
        finally:
            with self._polling, self._changing:
                # — the last documents: after an error too, and before Ray ends
                self._count_seconds()
                if self._metrics is not None:
                    self._count(self._metrics.tick, self._progress(), self._seconds)
                self._mailbox = self._metrics = None
                self._watchdog = Watchdog(self._stall_limit_s)

    def _open_metrics(self, spec: str, plan: Plan) -> None:
        self._metrics = RunMetrics(spec, plan)

    def take_in(self, reports: Iterable[WorkerReport], now_s: float) -> None:
        """Adds workers' reports to the progress, which is announced within a second."""
        with self._changing:
            for report in reports:
                if report.phase in WORKER_PHASES and _order(report.phase) > _order(self._phase):
                    self._phase = report.phase
                # — reports and commits arrive on different ways, in any order
                committed = report.work in self._committed_work
                if report.work is not None and report.phase == LABELLING and not committed:
                    self._at_work[report.work] = report
                self._watchdog.hear(report, now_s)

    def _count_seconds(self) -> None:
        """Counts the time since the last call to the phase."""
        now_s = time.monotonic()
        self._seconds[self._phase or "starting"] += now_s - self._entered_s
        self._entered_s = now_s

    def _progress(self) -> Progress:
        counts = self._committed
        for engine in self._at_work.values():
            counts = _added(counts, (engine.answered, engine.failed, engine.read, engine.work_done))
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
        while not self._closed.wait(POLL_S):
            with self._polling:
                if self._mailbox is not None:
                    self._read(self._mailbox)
            now_s = time.monotonic()
            with self._changing:
                self._count_seconds()
                self._watchdog.hear(self._of_driver(now_s), now_s)
                stalls = list(self._watchdog.stalls(now_s, is_worker_alive))
                progress = self._progress()
                if self._metrics is not None:
                    self._count(self._metrics.tick, progress, self._seconds)
                self._announce(progress)
            if self._bound and progress.phase in DRIVER_PHASES and time.time() >= self._bound[0]:
                left = "nothing was labelled; run the same command again with more time"
                self._end(f"ended by {self._bound[1]} while {progress.phase}; {left}")
            for stall in stalls:
                self._tell(stall)

    def _of_driver(self, now_s: float) -> WorkerReport:
        """The driver's own report, with its silence."""
        phase = self._phase if self._phase in DRIVER_PHASES else WAITING
        report = WorkerReport(phase, DRIVER, answered=self._committed[0])
        return replace(report, silent_s=self._own.seconds(report, now_s, work_done))

    def _read(self, mailbox: Any) -> None:
        if ended := self._services.ended:
            self._end(
                f"Ray's {ended[0]} has ended (the system may have killed it for its memory). Run "
                f"the same command again: finished shards are kept"
            )
            return  # nobody would answer
        reports: list[WorkerReport] | None = None
        if not self._is_stopped(time.monotonic()):
            with suppress(GetTimeoutError, RayError):
                reports = ray.get(mailbox.take.remote(time.time()), timeout=MAILBOX_TIMEOUT_S)
        if reports is not None:
            self.take_in(reports, time.monotonic())
            return
        with self._changing:  # without reports, a silent worker may be healthy
            self._watchdog.excuse(time.monotonic())

    def _tell(self, stall: Stall) -> None:
        """Names a stall in the log, and ends the run where no other worker can go on."""
        if not stall.ends:
            logger.warning("%s; %s", stall, stall.then)
        elif stall.report.cause is not None:
            left = "Finished shards are kept"
            self._end(f"every worker fails with: {stall.report.cause}. {left}", ModelError)
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

    def _end(self, message: str, kind: type[AssayError] = StalledError) -> None:
        """Ends the run with this error, once; in another thread than the main one, logs it."""
        with self._ending:
            if self._error is not None or self._closed.is_set():
                return
            self._error = kind(message)
            if self._main is None:
                logger.warning("%s", message)
            else:
                signal.pthread_kill(self._main, signal.SIGINT)

    def _on_interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        if self._error is not None:
            raise KeyboardInterrupt


def _added(a: Counts, b: Counts) -> Counts:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


def _order(phase: str) -> int:
    """The position of a worker's phase. Other phases come last: no worker's phase replaces them."""
    return WORKER_PHASES.index(phase) if phase in WORKER_PHASES else len(WORKER_PHASES)
