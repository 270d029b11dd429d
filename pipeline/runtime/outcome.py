"""What a run labelled, and how it ended.

Entry points: `Tally`, which adds up the shards' counts and holds the limit on failed rows, and
`Outcome`, which publishes a labelled output.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from pipeline.errors import FailedRowsError, StorageError, UnavailableError
from pipeline.fitted.certificate import Certificate, hash_of
from pipeline.ledger.cells import is_whole
from pipeline.ledger.counts import Counts, ShardCounts
from pipeline.ledger.counts_log import counted, of_shards, skipped_by_all
from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.snapshot_files import files_of, label_files_of
from pipeline.ledger.snapshots import Contents, asked_of, publish, read_snapshot, snapshot_numbers
from pipeline.runtime.job import Job
from pipeline.runtime.plan import Plan
from pipeline.sources.documents import is_failed_status
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store

# A run ends when this many shards fail in a row, or two for each engine if these are more. Those of
# a bad file count once: its shards are next to each other, and other files may be good.
_FAILED_IN_A_ROW = 20
# What is counted once for a shard with several work items.
_OF_ROWS = ("rows", "outside", "undecided", "reused")
_SHOWN = 3  # failed shards with their reasons


@dataclass(slots=True)
class Tally:
    """What a run labelled: the sums of its shards' counts, and the limit on failed rows.

    A shard in several work items has its rows counted once, as in the first one.
    """

    input_rows: int = 0
    max_error_rate: float | None = None  # the most rows of the input that may fail, as a share
    n: Counts = field(default_factory=Counts)
    failures: dict[str, str] = field(default_factory=dict)  # the last reason, by shard id
    _failed_in_a_row: set[str] = field(default_factory=set, repr=False)  # bad files, ids of shards
    _counted: set[str] = field(default_factory=set, repr=False)  # ids of shards

    def add(self, counts: ShardCounts, *, engines: int) -> None:
        """Takes in one shard; an error when too many rows, or too many shards in a row, failed."""
        self.add_read(counts, engines=engines)
        if counts.error is None:
            repeated = _OF_ROWS if counts.sid in self._counted else ()
            self.n.update({key: n for key, n in counts.n.items() if key[0] not in repeated})
            self._counted.add(counts.sid)
            outside = self.n["outside",]
            # — rows that are not read yet may be outside
            self._check(self.n.failed, self.input_rows - outside, "at most " if outside else "")

    def add_read(self, counts: ShardCounts, *, engines: int) -> None:
        """Takes in a shard that was read; an error if none succeeds any more."""
        if counts.error is None:
            self.n["created",] += len(counts.files)
            self._failed_in_a_row.clear()
            return
        if counts.ends_run is not None:
            raise counts.ends_run
        self.failures[counts.sid] = counts.error
        self._failed_in_a_row.add(counts.bad_file or counts.sid)
        if len(self._failed_in_a_row) >= max(_FAILED_IN_A_ROW, 2 * engines):
            kind = UnavailableError if counts.unavailable else StorageError
            number = len(self._failed_in_a_row)
            raise kind(
                f"{number:,} files or shards failed, and no shard succeeded between them; finished "
                f"shards are kept; the last reason: {counts.error}"
            )

    def count_finished(
        self, store: Store, spec: JobSpec, planned: Plan, *, publishes: bool
    ) -> int | None:
        """Documents of the finished shards that a task is asked about; None without a condition.

        FailedRowsError if these are published, and too many of their rows failed in this run or
        before; those of a shard are of its worst task. A label file is read only if nothing has its
        counts, or if each of several tasks has a condition of its own.
        """
        checks = publishes and self.max_error_rate is not None
        if planned.limit is None and not checks:
            return None
        done = planned.done
        finished = [shard for shard in planned.shards if is_whole(shard, list(done.fp), done)]
        files = counted(store, label_files_of(finished, done), keep=True)
        rows, skipped = sum(shard.rows for shard in finished), of_shards(files, "skipped", "min")
        if checks:
            self._check(of_shards(files, "failed", "max"), rows - skipped)
        if planned.limit is None:
            return None
        if len(spec.tasks) > 1 and all(task.when is not None for task in spec.tasks):
            skipped = skipped_by_all(store, files)
        return rows - skipped

    def _check(self, failed: int, rows: int, bound: str = "") -> None:
        limit = self.max_error_rate
        # — the product may be below a whole number that it equals in decimal: 0.29 * 100
        if limit is None or failed / max(rows, 1) <= limit:
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

    job: Job
    store: Store  # of the output
    plan: Plan
    """All shards and the missing work, as of the LIST when labelling ended."""
    tally: Tally
    """Counts of the rows, statuses and labels of this run."""
    seconds: float
    asked: int | None = None
    """Documents of the finished shards that a task is asked about; None without a condition."""
    stopped: str | None = None
    """The option that ended the run before it was complete."""
    snapshot: int | None = None
    """Number of the published snapshot; None if none was published."""
    kept: int | None = None
    """Number of a snapshot that stays current, because it shows more documents than this run."""

    def __repr__(self) -> str:
        shown = "no snapshot" if self.snapshot is None else f"snapshot {self.snapshot}"
        rows = f"{self.rows - self.missing_rows:,} of {self.rows:,} documents labelled"
        return f"<Outcome: {rows}, {shown} of {self.output}>"

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
    def certificates(self) -> dict[str, Certificate]:
        """By task with a cascade, what was proved of the documents of this run."""
        shards = hash_of(shard.id for shard in self.plan.shards)
        of_job = {} if self.limit else self.job.cascades
        return {task: own for task, own in of_job.items() if own.shards == shards}

    @property
    def contents(self) -> Contents:
        """The contents of the snapshot of a complete output; its number is 0, which none has."""
        job = self.job
        shards, tasks = self.plan.shards, job.snapshot_tasks
        files, rows = files_of(shards, tasks, self.plan.done), sum(shard.rows for shard in shards)
        return Contents(0, job.spec.name, tasks, files, asked=rows, certificates=self.certificates)

    def published(self, *, partial: bool) -> Outcome:
        """Publishes the complete output, or with `partial` its complete shards, if there are any.

        Nothing new is published if the last snapshot shows the same. Without `partial`, a run with
        a condition publishes nothing where the current snapshot shows more documents.
        """
        done, number = self.plan.done, None
        kept = self._shows_more() if self.complete and not partial else None
        finished = any(is_whole(shard, list(done.fp), done) for shard in self.plan.shards)
        if kept is None and (self.complete or (partial and finished)):
            number = publish(
                self.store,
                self.job.spec.name,
                self.job.snapshot_tasks,
                self.plan.shards,
                done,
                created_at=datetime.now(UTC).isoformat(timespec="seconds"),
                missing_files=len(self.unreadable),
                limit=self.limit,
                asked=self.asked,
                certificates=self.certificates,
            )
        failpoint("published")
        return replace(self, snapshot=number, kept=kept)

    def _shows_more(self) -> int | None:
        """The current snapshot's number, if publishing a run with a condition would hide documents.

        Readers who name no snapshot read the current one, of any spec.
        """
        numbers = snapshot_numbers(self.store)
        if self.asked is None or not numbers:
            return None
        current = read_snapshot(self.store, numbers[0])
        is_complete = "limit" not in current and current["complete"]
        return numbers[0] if is_complete or asked_of(current) > self.asked else None
