"""What a run does at this moment: the reports of its workers, and their sum for people.

Entry points: `ShardProgress`, with which a worker reports, and `Mailbox`, the actor from which the
driver takes the reports. All of this is for display. Must import neither torch nor Arrow, because
the mailbox is a process, which should be small.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.ledger.cells import WorkItem
    from pipeline.runtime.job import Plan

# A worker sends at most two reports a second, even if its batches are faster.
REPORT_S = 0.5
# A worker repeats its last report this often: one that repeats nothing is stopped, or cut off.
REPEAT_S = 1.0

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
READING = "reading"  # only of a worker; it is not a phase of the run
# In their order: a later phase replaces an earlier one.
WORKER_PHASES = (STARTING_WORKERS, FETCHING, CONVERTING, LOADING, LABELLING)

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
    finished: bool = False  # the shard is read, or it is labelled and not yet committed
    slowest_s: float | None = None  # the longest time between two batches; None: no batch yet


Send = Callable[[WorkerReport], None]


def ignore(_report: object) -> None:
    """Takes a report that nobody reads."""


def work_report(phase: str, work: WorkItem) -> WorkerReport:
    """The report of a worker that begins with a shard."""
    piece = work.shard.piece
    place = f"{work.shard.path}: rows {piece.start_row} to {piece.end_row}"
    return WorkerReport(phase, work=work_key(work.shard.id, work.tasks), place=place)


class ShardProgress:
    """Reports one worker's progress with one shard.

    Args:
        send: Takes the reports.
        work: The shard and its tasks.
        rows: Rows that the model reads.
        slowest_s: The longest time between two batches of the worker's earlier shards.
    """

    def __init__(self, send: Send, work: WorkItem, *, rows: int, slowest_s: float | None) -> None:
        self._rows = rows
        self._send = send
        self._last_sent_s = self._last_batch_s = time.monotonic()
        self._report = replace(work_report(LABELLING, work), slowest_s=slowest_s)
        send(self._report)

    @property
    def slowest_s(self) -> float | None:
        """The longest time between two batches so far."""
        return self._report.slowest_s

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
        )
        if now_s - self._last_sent_s >= REPORT_S:
            self._last_sent_s = now_s
            self._send(self._report)

    def finish(self, rows: int, failed: int) -> None:
        """Reports that the shard is labelled, with the rows that the model did not read."""
        self._send(
            replace(self._report, answered=rows, failed=failed, work_done=rows, finished=True)
        )


class Mailbox:
    """Keeps the latest report of each worker about each shard until the driver takes it."""

    def __init__(self) -> None:
        self._latest: dict[object, WorkerReport] = {}

    def put(self, report: WorkerReport) -> None:
        """Keeps the report in place of the worker's earlier one about the same shard."""
        key = report.worker, report.work
        self._latest.pop(key, None)  # — the order is that of the latest reports
        self._latest[key] = report

    def take(self) -> list[WorkerReport]:
        """The reports since the last call, the oldest first."""
        latest, self._latest = self._latest, {}
        return list(latest.values())


@cache
def sender(mailbox: Any) -> Send:
    """Sends this process's reports to the mailbox, the handle of an actor, and waits for nothing.

    A thread repeats the latest report every second, from now until the process ends. Without a
    mailbox (None) nobody reads the reports.
    """
    if mailbox is None:
        return ignore
    import ray

    node, pid = ray.util.get_node_ip_address(), os.getpid()  # type: ignore[no-untyped-call]
    actor_id = ray.get_runtime_context().get_actor_id() or ""
    latest = WorkerReport(STARTING_WORKERS)
    sending = threading.Lock()  # a repeated report must not arrive after a later one
    ended = threading.Event()

    def send(report: WorkerReport | None = None) -> None:
        nonlocal latest
        with sending:
            latest = latest if report is None else report
            own = replace(latest, worker=f"process {pid} on {node}", actor_id=actor_id, pid=pid)
            mailbox.put.remote(own)

    def repeat() -> None:
        send()
        while not ended.wait(REPEAT_S):
            send()

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
