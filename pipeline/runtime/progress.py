"""What a run does at this moment: its phases, the report of a worker, and the sum for people.

Entry points: `WorkerReport`, `LabelProgress`, with which a worker reports on its shard, and
`Progress`. `mailbox` brings the reports to the driver. Must import neither torch nor Arrow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.ledger.cells import WorkItem
    from pipeline.runtime.plan import Plan

logger = logging.getLogger(__name__)

LOCATING = "locating the model"
LISTING = "listing the input"
STARTING_RAY = "starting Ray"
CONNECTING = "connecting to Ray"
CONVERTING = "converting the model"
FETCHING = "fetching the model"
READING_TEXTS = "reading new texts"
STARTING_WORKERS = "starting the workers"
LOADING = "loading the model"
LABELLING = "labelling"
PUBLISHING = "publishing"
COMPARING = "comparing the answers with those of separate prompts"  # of `check`
# Phases of a worker, which the run as a whole does not have.
WAITING = "waiting for work"
READING = "reading"
COMMITTING = "committing"
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
    work: WorkKey | None = None  # None: no shard is at work
    place: str = ""  # of the shard: file and rows
    answered: int = 0  # rows of the shard; those that the model does not read count when it ends
    work_done: float = 0.0  # rows by their cost: half of the shard's tokens are half of its rows
    batches: int = 0  # a report of another batch is a sign of life


Send = Callable[[WorkerReport], None]


def ignore(*_: object, **__: object) -> None:
    """Discards a report."""


class Display:
    """What only shows a run, such as its progress: its errors never end the run."""

    def __init__(self, name: str) -> None:
        self._name = name  # for the log
        self._failed = False

    def __call__(self, show: Callable[..., object], *values: object) -> None:
        """Calls `show`. The first error is logged, and nothing is called after it."""
        if self._failed:
            return
        try:
            show(*values)
        except Exception as error:  # — of a terminal or Prometheus: the run goes on
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
        self._report = work_report(LABELLING, work)
        self._send(self._report)

    def advance(self, answered: int, share: float, of_shard: float = 1.0) -> None:
        """Reports one more batch: the last of `answered` rows, and a share of the cost.

        The cost is that of the shard, or of a part which has this share of its rows.
        """
        self._report = replace(
            self._report,
            answered=self._report.answered + answered,
            work_done=self._report.work_done + share * of_shard * self._rows,
            batches=self._report.batches + 1,
        )
        self._send(self._report)


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
    """Documents of those that failed, in finished shards."""
    work_done: float = 0.0
    """Documents by their cost, for the time left: workers read long documents first."""
    committed: int = 0
    """Documents of finished shards, which a later run does not label again."""

    @property
    def counts(self) -> bool:
        """Whether documents are counted in this phase."""
        return self.phase in (READING, READING_TEXTS, LABELLING)

    @property
    def verb(self) -> str:
        """What happened to the documents that are counted."""
        return "read" if self.phase in (READING, READING_TEXTS) else "labelled"
