"""What a run labelled, and how it ended.

Entry points: `Tally`, which adds up the shards' counts and holds the limit on failed rows, and
`Outcome`, which publishes a labelled output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from pipeline.errors import FailedRowsError, StorageError, UnavailableError
from pipeline.ledger.cells import Committed, is_whole
from pipeline.ledger.counts import Counts, ShardCounts
from pipeline.ledger.counts_log import of_shards
from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.snapshots import (
    Contents,
    asked_of,
    contents_of,
    counted_files,
    publish,
    read_snapshot,
    snapshot_numbers,
)
from pipeline.runtime.job import Job
from pipeline.runtime.plan import Plan
from pipeline.sources.documents import is_failed_status
from pipeline.sources.shards import Shard
from pipeline.stores.store import Store

# A run ends when this many shards fail in a row, or two for each engine if these are more.
_FAILED_IN_A_ROW = 20
# What is counted once for a shard with several work items.
_OF_ROWS = ("rows", "outside", "undecided", "reused")
_SHOWN = 3  # failed shards with their reasons


@dataclass(slots=True)
class Tally:
    """What a run labelled: the sums of its shards' counts, and the limit on failed rows.

    A shard in several work items has its rows counted once. Its statuses are those of the work
    item in which most rows failed.
    """

    input_rows: int = 0
    max_error_rate: float | None = None  # the most rows of the input that may fail, as a share
    n: Counts = field(default_factory=Counts)
    failures: dict[str, str] = field(default_factory=dict)  # the last reason, by shard id
    _failed_in_a_row: set[str] = field(default_factory=set, repr=False)
    _shards: dict[str, Counts] = field(default_factory=dict, repr=False)  # their rows

    def add(self, counts: ShardCounts, *, engines: int) -> None:
        """Takes in one shard; an error when too many rows, or too many shards in a row, failed."""
        self.add_read(counts, engines=engines)
        if counts.error is not None:
            return
        rows, before = counts.n.only(*_OF_ROWS), self._shards.get(counts.sid, Counts())
        self.n.update(counts.n)
        if before:
            self.n.subtract(before + rows)
            reused = max(before["reused",], rows["reused",])
            rows = Counts(before if before.failed > rows.failed else rows)
            rows["reused",] = reused
            self.n.update(rows)
        self._shards[counts.sid] = rows
        self._check(self.n.failed)

    def add_read(self, counts: ShardCounts, *, engines: int) -> None:
        """Takes in a shard that was read; an error if none succeeds any more."""
        if counts.error is None:
            self.n["created",] += len(counts.files)
            self._failed_in_a_row.clear()
            return
        self.failures[counts.sid] = counts.error
        self._failed_in_a_row.add(counts.sid)
        if len(self._failed_in_a_row) >= max(_FAILED_IN_A_ROW, 2 * engines):
            kind = UnavailableError if counts.unavailable else StorageError
            number = f"{len(self._failed_in_a_row):,} shards failed, and none succeeded between"
            raise kind(f"{number} them; finished shards are kept; the last reason: {counts.error}")

    def check_shards(
        self, store: Store, spec_name: str, shards: Sequence[Shard], done: Committed
    ) -> None:
        """FailedRowsError if too many rows of these shards failed, in this run or before.

        The failed rows of a shard are those of its worst task. A label file is read only if nothing
        has its counts.
        """
        if self.max_error_rate is None:
            return
        files = counted_files(store, spec_name, shards, done, keep=True)
        skipped = of_shards(files, "skipped", "min")
        rows = sum(shard.rows for shard in shards) - skipped
        self._check(of_shards(files, "failed", "max"), rows)

    def _check(self, failed: int, of_rows: int | None = None) -> None:
        outside = self.n["outside",]
        limit, rows = self.max_error_rate, self.input_rows - outside
        # — rows that are not read yet may be outside
        bound = "at most " if of_rows is None and outside else ""
        rows = rows if of_rows is None else of_rows
        if limit is None or failed <= limit * rows:
            return
        reasons = self.n.by("rows").most_common()
        shown = ", ".join(f"{name} {count:,}" for name, count in reasons if is_failed_status(name))
        raise FailedRowsError(
            f"{failed:,} of {bound}{rows:,} rows failed, more than max_error_rate {limit:g} allows"
            f"{shown and f' (in this run: {shown})'}; finished shards are kept, and no snapshot "
            f"was published; remove the cause and run with --retry-failed, or raise max_error_rate"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: the labelled output, and the snapshot that shows it once it is published."""

    job: Job = field(repr=False)  # has storage options, which may be secret
    store: Store = field(repr=False)  # of the output
    plan: Plan = field(repr=False)
    """All shards and the missing work, as of the LIST when labelling ended."""
    tally: Tally
    """Counts of the rows, statuses and labels of this run."""
    seconds: float
    asked: int | None = None
    """Documents of the finished shards that the condition of the run accepts; None without one."""
    stopped: str | None = None
    """The option that ended the run before it was complete."""
    snapshot: int | None = None
    """Number of the published snapshot; None if none was published."""
    kept: int | None = None
    """Number of a snapshot that stays current, because it shows more documents than this run."""

    @property
    def output(self) -> str:
        """The output of the spec."""
        return self.job.spec.output

    @property
    def rows(self) -> int:
        """Rows of the whole input."""
        return self.plan.rows

    @property
    def shards(self) -> int:
        """Shards of the whole input."""
        return len(self.plan.shards)

    @property
    def missing_shards(self) -> int:
        """Shards that are not finished."""
        return self.plan.missing_shards

    @property
    def missing_rows(self) -> int:
        """Rows of the shards that are not finished."""
        return self.plan.missing_rows

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Files whose rows cannot be counted, each with the reason."""
        return self.plan.cuts.unreadable

    @property
    def limit(self) -> str | None:
        """The condition of the run."""
        return self.plan.limit

    @property
    def complete(self) -> bool:
        """Whether every shard is finished and every file was read."""
        return not self.plan.work_items and not self.unreadable

    @property
    def failed_shards(self) -> tuple[str, ...]:
        """Shards that a store or their input failed, each with the reason; they are missing."""
        reasons = self.tally.failures
        missing = dict.fromkeys(work.shard.id for work in self.plan.work_items)
        return tuple(reasons[sid] for sid in missing if sid in reasons)

    @property
    def left(self) -> str:
        """What is not labelled yet, and how to go on."""
        failed, reasons = "", self.failed_shards
        if reasons:
            shown = [*reasons[:_SHOWN], *["..."] * (len(reasons) > _SHOWN)]
            failed = f"; failed shards ({len(reasons):,}): {'; '.join(shown)}"
        return (
            f"left: {self.missing_shards:,} of {self.shards:,} shards and {self.missing_rows:,} of "
            f"{self.rows:,} documents{failed}; run the same command again to go on"
        )

    @property
    def snapshot_to_keep_current(self) -> int | None:
        """The current snapshot's number, if publishing a run with a condition would hide documents.

        Readers who name no snapshot read the current one, of any spec.
        """
        numbers = snapshot_numbers(self.store)
        if self.asked is None or not numbers:
            return None
        current = read_snapshot(self.store, numbers[0])
        is_whole = "limit" not in current and current["complete"]
        return numbers[0] if is_whole or asked_of(current) > self.asked else None

    @property
    def contents(self) -> Contents:
        """The contents of the snapshot that `publish` would make."""
        return contents_of(
            self.job.spec.name,
            self.job.snapshot_tasks,
            self.plan.shards,
            self.plan.done,
        )

    def publish(self, *, partial: bool = False) -> int:
        """The number of the snapshot that shows it; made now unless the last snapshot does."""
        return publish(
            self.store,
            self.job.spec.name,
            self.job.snapshot_tasks,
            self.plan.shards,
            self.plan.done,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            partial=partial,
            missing_files=len(self.plan.cuts.unreadable),
            limit=self.limit,
        )

    def publish_part(self) -> int | None:
        """The number of a snapshot of the complete shards; None without any.

        FailedRowsError if the share of their rows that failed exceeds `max_error_rate`.
        """
        done = self.plan.done
        whole = [shard for shard in self.plan.shards if is_whole(shard, list(self.job.fp), done)]
        if not whole:
            return None
        self.tally.check_shards(self.store, self.job.spec.name, whole, done)
        return self.publish(partial=True)

    def published(self, *, partial: bool) -> Outcome:
        """Publishes the complete output, or with `partial` its complete shards.

        Without `partial`, a run with a condition publishes nothing where the current snapshot shows
        more documents.
        """
        number = kept = None
        if self.complete and not partial:
            kept = self.snapshot_to_keep_current
        if self.complete and kept is None:
            number = self.publish()
        elif partial:
            number = self.publish_part()
        failpoint("published")
        return replace(self, snapshot=number, kept=kept)


def rows_asked(store: Store, spec_name: str, plan: Plan) -> int | None:
    """Documents of the finished shards that the plan's condition accepts; None without one."""
    if plan.limit is None:
        return None
    shards = [shard for shard in plan.shards if is_whole(shard, list(plan.done.fp), plan.done)]
    files = counted_files(store, spec_name, shards, plan.done, keep=True)
    return sum(shard.rows for shard in shards) - of_shards(files, "skipped", "min")
