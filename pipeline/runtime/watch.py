"""The driver's view of a run: its phase, its progress, and workers that stopped answering.

Entry point: `Watch`. It reads the workers' reports once a second on a thread of its own. If the
reports are lost, the run continues, and progress counts committed shards.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.errors import AssayError, ModelError, StalledError
from pipeline.ledger.counts import ShardCounts
from pipeline.runtime.job import Job
from pipeline.runtime.left_out import left_out
from pipeline.runtime.mailbox import ANSWER_TIMEOUT_S, STALL_LIMIT_S, Letter, Mailbox, Post
from pipeline.runtime.metrics import RunMetrics
from pipeline.runtime.plan import Plan
from pipeline.runtime.progress import (
    LABELLING,
    STARTING_WORKERS,
    WAITING,
    WORKER_PHASES,
    Display,
    Progress,
    WorkerReport,
    WorkKey,
    work_key,
)

logger = logging.getLogger(__name__)

POLL_S = 1.0
# A worker ends itself at its limit. The run ends this much later, if no worker does anything. Ray
# Data waits without a limit where no engine can load: the run ends if no engine can load on any
# node, and no worker has reported for this time.
GRACE_S = 10.0
# A worker that is at work, and sends nothing for this time or this share of its limit, is named.
QUIET_S, QUIET_SHARE = 30.0, 0.05
# The number of workers and this many more may end themselves without an answered document between
# them: the search for one row among 65,536 takes nine.
MORE_ENDS = 10


class Workers:
    """Which workers end, and whether some worker is at work."""

    def __init__(
        self, limit_s: float, workers: int = 1, is_out: Callable[[], bool] = lambda: True
    ) -> None:
        self.limit_s = limit_s
        self._workers = workers
        self._is_out = is_out  # whether every node is one on which a worker could not load
        self._last: tuple[Letter, float] | None = None  # of one that is at work, and when it came
        self._unable: tuple[AssayError, float] | None = None  # to load; when a worker last reported
        self._ends: list[Letter] = []  # of workers that ended since the last answered document
        self._named: set[tuple[str, str]] = set()  # nodes and causes
        self._at_work: dict[str, tuple[Letter, float]] = {}  # by worker, and when it came

    def begin(self) -> None:
        """Waits for a first report again: machines and models may take hours to come."""
        self._last = self._unable = None

    def answered(self) -> None:
        """Notes that documents are answered."""
        self._ends.clear()

    def note(self, letter: Letter, now_s: float) -> None:
        """Notes a report; logs each worker that ends, and each node and cause that is left out."""
        self._at_work.pop(letter.worker, None)
        if not letter.is_last and letter.report.phase != WAITING:
            self._at_work[letter.worker] = letter, now_s
        # — workers that only start, and die, are not at work
        if letter.report.phase not in (WAITING, STARTING_WORKERS) or self._last is None:
            self._last = letter, now_s
        if letter.is_last:
            self._end(letter, now_s)
            return
        if self._unable is not None:
            self._unable = self._unable[0], now_s
        if letter.report.answered:
            self.answered()

    def _end(self, letter: Letter, now_s: float) -> None:
        named = letter.node_id, str(letter.cause)
        if letter.cause is None or letter.starts_again:
            self._ends.append(letter)
            logger.warning("%s; it is ended, and Ray starts another", _end_of(letter, self.limit_s))
            return
        self._unable = letter.cause, now_s
        if named not in self._named:
            self._named.add(named)
            logger.warning("%s cannot load: %s; it is left out", letter.worker, letter.cause)

    def name_quiet(self, now_s: float, done: Set[WorkKey]) -> None:
        """Logs each worker that stops to report in the middle of its work, unless that is done."""
        for letter, came_s in list(self._at_work.values()):
            if (silent_s := now_s - came_s) >= max(QUIET_S, QUIET_SHARE * self.limit_s):
                del self._at_work[letter.worker]
                if letter.report.work not in done:
                    text = "%s has not reported for %.0f s (%s): it was killed, or is cut off"
                    logger.warning(text, letter.worker, silent_s, _doing(letter))

    def check(self, now_s: float) -> None:
        """StalledError if no worker is at work for the limit; an error if every one fails."""
        advice = "Look at that machine, then run the same command again: finished shards are kept"
        if len(self._ends) > MORE_ENDS + self._workers:
            end = self._ends[-1]
            if end.cause is None:
                text = f"every worker stalls; {_end_of(end, self.limit_s)}. {advice}"
                raise StalledError(text)
            raise ModelError(f"every worker fails with: {end.cause}. Finished shards are kept")
        if self._unable is not None:
            cause, reported_s = self._unable
            # — on another node, a worker may still be starting
            if now_s - reported_s >= GRACE_S and self._is_out():
                raise cause
        if self._last is not None:
            last, came_s = self._last
            silent_s = now_s - came_s
            if silent_s >= self.limit_s + GRACE_S:
                raise StalledError(f"no worker is at work; {_end_of(last, silent_s)}. {advice}")


class Nodes:
    """The nodes of a cluster during a run; each that comes or goes is logged."""

    def __init__(self) -> None:
        self._alive: set[str] | None = None  # ids, since the last look

    def look(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Compares the nodes, as `ray.nodes` has them, with those of the last look."""
        alive = {node["NodeID"] for node in nodes if node["Alive"]}
        before, self._alive = self._alive, alive
        if before is None:
            return
        for node in nodes:
            id, address = node["NodeID"], node["NodeManagerAddress"]
            if id in alive - before:
                logger.info("node %s has joined the cluster", address)
            elif id in before - alive:
                reason = (
                    node["DeathReasonMessage"].strip().partition("\n")[0] or "no reason is known"
                )
                text = "node %s is gone (%s); what it had not finished runs on other nodes"
                logger.warning(text, address, reason)


class Watch:
    """Announces what a run does, at each change and every second, until it is closed.

    Each document is counted once: reports and commits come on different ways, in any order.
    `announce` is called by two threads, one at a time. After `stall_limit_s` without a sign of life
    a worker ends itself, and without a worker that is at work `check` ends the run.
    """

    def __init__(
        self, announce: Callable[[Progress], None], *, stall_limit_s: float = STALL_LIMIT_S
    ) -> None:
        self._announce = partial(Display("the progress"), announce)
        self._changing = threading.Lock()  # held while the counts change or are announced
        self._committed = Progress("")  # the phase, the plan, and the counts of committed shards
        self._committed_work: set[WorkKey] = set()
        self._at_work: dict[WorkKey, WorkerReport] = {}
        self._workers = Workers(stall_limit_s)
        self._asking = threading.Lock()  # so that Ray is not called after its end
        self._nodes = Nodes()
        self._mailbox: Any = None  # the handle of an actor
        self._metrics: RunMetrics | None = None
        self._count = Display("the metrics of Ray")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    @property
    def progress(self) -> Progress:
        """The counts of committed shards and of those at work."""
        counts, at_work = self._committed, self._at_work.values()
        return replace(
            counts,
            answered=counts.answered + sum(report.answered for report in at_work),
            work_done=counts.work_done + sum(report.work_done for report in at_work),
        )

    def enter(self, phase: str, plan: Plan | None = None) -> None:
        """Announces a phase; with a plan, which counts its own work, the counts begin again."""
        with self._changing:
            self._committed = replace(self._committed, phase=phase)
            if plan is not None:
                rows = sum(work.shard.rows for work in plan.work_items)
                self._committed = Progress(phase, plan, documents=rows)
                self._committed_work.clear()
                self._at_work.clear()
            self._workers.begin()
            self._announce(self.progress)

    def read(self, rows: int) -> None:
        """Announces that the texts of `rows` more documents are read."""
        with self._changing:
            self._add(rows)
            self._announce(self.progress)

    def committed(self, counts: ShardCounts) -> None:
        """Announces one more committed shard, or one that failed."""
        key = work_key(counts.sid, counts.tasks)
        with self._changing:
            self._at_work.pop(key, None)
            if counts.error is not None:
                if counts.ends_run is None:
                    logger.warning("a shard failed, and the others go on: %s", counts.error)
                return
            self._committed_work.add(key)
            self._committed = replace(self._committed, phase=LABELLING)
            kept = counts.n.total_of("rows")
            self._add(kept + counts.n["outside",], counts.n.failed, kept)
            self._workers.answered()
            if self._metrics is not None:
                self._count(self._metrics.committed, counts)
            self._announce(self.progress)

    def _add(self, rows: int, failed: int = 0, kept: int = 0) -> None:
        """Counts rows of finished shards, of which the condition of the run accepts `kept`."""
        before = self._committed
        self._committed = replace(
            before,
            answered=before.answered + rows,
            failed=before.failed + failed,
            work_done=before.work_done + rows,
            committed=before.committed + kept,
        )

    def check(self) -> None:
        """An error if the workers cannot go on; the graph calls it."""
        # — without the lock, which a stopped terminal may hold
        self._workers.check(time.monotonic())

    @contextmanager
    def mailbox(self, job: Job, plan: Plan, longest_batch_s: float) -> Iterator[Post | None]:
        """The post of the job's workers, which is read inside the block; None without Ray.

        Inside the block, the run's metrics are counted, too. No worker counts as silent before
        `longest_batch_s`.
        """
        if not ray.is_initialized():
            yield None
            return
        limit_s = max(self._workers.limit_s, longest_batch_s)
        # — by default Ray takes any node, also one that may be cut off later
        on_this_node = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )
        # — if it is lost, a new mailbox gets each worker's next report
        kept: Any = ray.remote(num_cpus=0, max_restarts=-1)(Mailbox)
        mailbox = kept.options(scheduling_strategy=on_this_node).remote()
        workers = job.placement.actors
        post = Post(mailbox, limit_s, workers, job.run.unable)
        with self._changing:
            self._workers = Workers(limit_s, workers, lambda: left_out(post)[1])
            self._nodes = Nodes()
            self._metrics = RunMetrics(job.spec.name, plan)
        self._mailbox = mailbox
        try:
            yield post
        finally:
            with self._asking:
                self._mailbox = None
            with self._changing:
                self._show(0.0)
                self._metrics = None

    def take_in(self, letters: Iterable[Letter], now_s: float) -> None:
        """Adds all new reports to the progress, which is announced within a second."""
        with self._changing:
            for letter in letters:
                self._note(letter.report)
                self._workers.note(letter, now_s)
            self._workers.name_quiet(now_s, self._committed_work)

    def _note(self, report: WorkerReport) -> None:
        """Notes the phase of a worker, and how much of its shard it has answered."""
        if _order(self._committed.phase) < _order(report.phase) < len(WORKER_PHASES):
            self._committed = replace(self._committed, phase=report.phase)
        work = report.work if report.phase == LABELLING else None
        if work is not None and work not in self._committed_work:
            self._at_work[work] = report

    def _poll(self) -> None:
        before_s = time.monotonic()
        while not self._closed.wait(POLL_S):
            with self._asking:
                letters = self._letters()
            now_s = time.monotonic()
            if letters is not None:
                self.take_in(letters, now_s)
            with self._changing:
                self._show(now_s - before_s)
            before_s = now_s

    def _letters(self) -> list[Letter] | None:
        """The reports since the last call; None from a mailbox that does not answer."""
        letters: list[Letter] | None = None
        if self._mailbox is not None:
            with suppress(RayError):
                self._nodes.look(ray.nodes())  # type: ignore[no-untyped-call]
                letters = ray.get(self._mailbox.take.remote(), timeout=ANSWER_TIMEOUT_S)
        return letters

    def _show(self, seconds: float) -> None:
        """Announces the progress after these seconds in the same phase."""
        progress = self.progress
        if self._metrics is not None:
            answered = progress.answered if progress.verb == "labelled" else 0
            missing = progress.documents - answered
            self._count(self._metrics.tick, progress.phase, seconds, missing)
        self._announce(progress)


def _end_of(letter: Letter, silent_s: float) -> str:
    """Why a worker ended, or what it did before its silence."""
    if letter.cause is not None:
        return f"{letter.worker} ended: {letter.cause}"
    shown = f"{letter.worker} has shown no sign of life for {silent_s:.0f} s"
    return f"{shown}; it is {_doing(letter)}"


def _doing(letter: Letter) -> str:
    return f"{letter.report.phase} {letter.report.place}".strip()


def _order(phase: str) -> int:
    """The position of a worker's phase. Other phases come last: no worker's phase replaces them."""
    return WORKER_PHASES.index(phase) if phase in WORKER_PHASES else len(WORKER_PHASES)
