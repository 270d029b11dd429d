"""What was done to a shard, in numbers: `ShardCounts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.errors import AssayError, UnavailableError, one_line
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.counts_log import FileCounts


@dataclass(frozen=True, slots=True)
class LabelCost:
    """What labelling some documents took."""

    label_seconds: float = 0.0
    asked_rows: int = 0  # rows that a model was asked about
    prefix_tokens_computed: int = 0
    question_tokens_computed: int = 0


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """The counts of one shard, or why it could not be read, labelled or committed."""

    sid: str
    rows: int
    status: Mapping[str, int]  # rows by status
    labels: Mapping[str, Mapping[str, int]]  # rows by label, by task; one may have several
    costs: Mapping[str, LabelCost]  # by the number of the reader, of those that were asked
    created: int = 0  # objects
    outside: int = 0  # rows of the input that were read and are not in the slice
    undecided: int = 0  # of these, rows on which `--where` cannot be computed
    # Rows in the slice that the question is not asked about, by task.
    skipped: Mapping[str, int] = field(default_factory=dict)
    reused: int = 0  # rows with the answers of other shards
    answered: Mapping[str, int] = field(default_factory=dict)  # rows with an answer, by task
    # Of tasks with a cascade: rows by the stage that decided, by task.
    stages: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    files: tuple[FileCounts, ...] = ()  # those that were created
    error: str | None = None  # with the place of the shard, in one line
    unavailable: bool = False  # whether the error may be gone later
    unable: bool = False  # no worker can load what it needs to answer

    @classmethod
    def of_failed(cls, work: WorkItem, error: Exception, *, unable: bool = False) -> ShardCounts:
        """The counts of a shard that could not be read, labelled or committed."""
        path, piece = work.shard.path, work.shard.piece
        place = f"{path}: rows {piece.start_row} to {piece.end_row}: "
        reason = str(error).partition("\n")[0].removeprefix(place).removeprefix(f"{path}: ")
        if not isinstance(error, AssayError):
            reason = f"internal error: {type(error).__name__}: {one_line(error)}"
        return cls(
            work.shard.id,
            rows=0,
            status={},
            labels={task: {} for task in work.tasks},
            costs={},
            error=f"{place}{reason}",
            unavailable=isinstance(error, UnavailableError),
            unable=unable,
        )
