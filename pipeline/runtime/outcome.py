"""What a run labelled, how it ended, and which rows failed.

Entry points: `RunCounts`, which adds up the shards' counts and holds the limit on failed rows, and
`retry_items`, the work that tries failed rows again. A row failed if the model was asked about its
text and gave no answer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import FailedRowsError, StorageError, UnavailableError
from pipeline.ledger.blocks import ShardCounts
from pipeline.ledger.cells import Committed, Source, WorkItem, committed, version_name
from pipeline.ledger.label_files import read_file
from pipeline.runtime.job import Job, Plan
from pipeline.sources.documents import OK, QUARANTINED
from pipeline.sources.shards import Shard, Slice, fields_of
from pipeline.stores.store import Store

READ_THREADS = 16
# A run ends when this many shards fail in a row, or two for each engine if these are more.
_FAILED_IN_A_ROW = 20
_SHOWN = 3  # failed shards with their reasons


@dataclass(frozen=True, slots=True)
class Tally:
    """What a run labelled: the sums of its shards' counts."""

    rows: int = 0
    asked_rows: int = 0  # rows that the model was asked about
    taken_over: int = 0  # rows with the answers of other shards
    created: int = 0  # objects: documents and label files
    status: Counter[str] = field(default_factory=Counter)
    labels: dict[str, Counter[str]] = field(default_factory=dict)  # by task
    label_seconds: float = 0.0
    prefix_tokens_computed: int = 0
    question_tokens_computed: int = 0
    tokens_saved: int = 0
    # Of cascades: the texts that each stage's model read, and the seconds that it took.
    stages: dict[int, tuple[int, float]] = field(default_factory=dict)
    last_stage: int | None = None  # of the cascade, if there is one alone
    # By task with a cascade, the documents that each stage decided.
    decided: dict[str, Counter[int]] = field(default_factory=dict)

    @property
    def last_stage_alone(self) -> float | None:
        """The seconds of labelling, had the last stage answered all texts of this run.

        From the texts that it was asked about in this run; None if there are none, or with several
        cascades. Where classifiers answer first, repeated texts count each time.
        """
        if self.last_stage is None:
            return None
        asked, seconds = self.stages.get(self.last_stage, (0, 0.0))
        first, _ = self.stages.get(0, (0, 0.0))
        return seconds / asked * (first or self.rows) if asked else None

    @property
    def reuse_ratio(self) -> float:
        """The share of the tokens of separate prompts that the model did not read."""
        computed = self.prefix_tokens_computed + self.question_tokens_computed
        whole = computed + self.tokens_saved
        return self.tokens_saved / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    output: str
    rows: int
    """Rows of the whole input."""
    shards: int
    missing_shards: int
    """Shards that are not finished."""
    tally: Tally
    """Counts of the rows, statuses and labels of this run."""
    seconds: float
    unreadable: tuple[str, ...]
    """Files whose rows cannot be counted, each with the reason."""
    snapshot: int | None
    """Number of the published snapshot; None if none was published."""
    missing_rows: int = 0
    """Rows of the shards that are not finished."""
    stopped: str | None = None
    """The option that ended the run before it was complete."""
    slice: Slice | None = None
    """The documents that the run was limited to."""
    slice_rows: int | None = None
    """Number of documents in the slice, of the finished shards."""
    kept: int | None = None
    """Number of a snapshot that stays current, because it shows more documents than the slice."""
    failed_shards: tuple[str, ...] = ()
    """Shards that a store or their input failed, each with the reason; they are missing."""
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of the output

    @property
    def complete(self) -> bool:
        """Whether every shard is finished and every file was read."""
        return self.missing_shards == 0 and not self.unreadable

    @property
    def left(self) -> str:
        """What is not labelled yet, and how to go on."""
        failed = ""
        if self.failed_shards:
            shown = [*self.failed_shards[:_SHOWN], *["..."] * (len(self.failed_shards) > _SHOWN)]
            failed = f"; failed shards ({len(self.failed_shards):,}): {'; '.join(shown)}"
        return (
            f"left: {self.missing_shards:,} of {self.shards:,} shards and {self.missing_rows:,} of "
            f"{self.rows:,} documents{failed}; run the same command again to go on"
        )


class FailedShards:
    """The last reason of each shard that failed; ends a run in which all of them do."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}  # by shard id
        self._in_a_row: set[str] = set()

    def add(self, counts: ShardCounts, *, engines: int) -> None:
        """Takes in one shard's counts; an error after too many shards without one that succeeds."""
        if counts.error is None:
            self._in_a_row.clear()
            return
        self.reasons[counts.sid] = counts.error
        self._in_a_row.add(counts.sid)
        if len(self._in_a_row) >= max(_FAILED_IN_A_ROW, 2 * engines):
            kind = UnavailableError if counts.unavailable else StorageError
            number = f"{len(self._in_a_row):,} shards failed, and none succeeded between them"
            raise kind(f"{number}; finished shards are kept; the last reason: {counts.error}")


class RunCounts:
    """The counts of one run's shards, and the limit on the share of its rows that may fail."""

    def __init__(self, *, rows: int, max_error_rate: float | None, stages: int = 0) -> None:
        self._rows = rows
        self._last_stage = stages - 1 if stages else None
        self._limit = max_error_rate
        self._counts: list[ShardCounts] = []
        self.failed = FailedShards()
        self._created = 0  # objects: documents and label files
        # — what labelling took, by stage and reader
        self._costs: defaultdict[str, Counter[str]] = defaultdict(Counter)
        # — by shard, which may be in several work items: the one in which most rows failed
        self._failed: Counter[str] = Counter()
        self._failed_rows = 0

    def add(self, counts: ShardCounts, *, engines: int) -> None:
        """Takes in one shard; FailedRowsError when too many rows failed by now."""
        self.failed.add(counts, engines=engines)
        if counts.error is not None:
            return
        self._created += counts.created
        for reader, cost in counts.costs.items():
            self._costs[reader].update(fields_of(cost))
        self._counts.append(counts)
        more = max(0, failed_rows(counts) - self._failed[counts.sid])
        self._failed[counts.sid] += more
        self._failed_rows += more
        self._check(self._failed_rows, self._rows)

    def add_documents_files(self, created: int) -> None:
        """Takes in the number of documents files that were created before anything was labelled."""
        self._created += created

    def slice_rows(self, store: Store, shards: Sequence[Shard], done: Committed) -> dict[str, int]:
        """The rows in the files of each sliced shard that has any, by shard id."""
        rows = {counts.sid: counts.rows for counts in self._counts}
        return rows | sliced_rows(store, [s for s in shards if s.id not in rows], done)

    def check_shards(
        self,
        store: Store,
        shards: Sequence[Shard],
        done: Committed,
        slice_rows: Mapping[str, int] | None = None,
    ) -> None:
        """FailedRowsError if too many rows of these shards failed, in this run or before."""
        if self._limit is None:
            return
        whole = [counts for counts in self._counts if set(counts.labels) == set(done.fp)]
        counted = {counts.sid: failed_rows(counts) for counts in whole}
        failed = sum(counted.get(shard.id, 0) for shard in shards)
        uncounted = [shard for shard in shards if shard.id not in counted]
        with ThreadPoolExecutor(READ_THREADS) as pool:
            failed += sum(pool.map(partial(_failed_in, store, done), uncounted))
        rows = (shard.rows if slice_rows is None else slice_rows[shard.id] for shard in shards)
        self._check(failed, sum(rows))

    @property
    def tally(self) -> Tally:
        """The sums. A shard in several work items has its rows counted once.

        Its statuses are those of the work item in which most rows failed.
        """
        shards = {counts.sid: counts for counts in sorted(self._counts, key=failed_rows)}
        status: Counter[str] = Counter()
        for shard in shards.values():
            status.update(shard.status)
        labels: dict[str, Counter[str]] = {}
        for counts in self._counts:
            for task, by_label in counts.labels.items():
                labels.setdefault(task, Counter()).update(by_label)
        costs = sum(self._costs.values(), Counter())
        # — a document that several stages were asked about is one
        asked = max((cost["asked_rows"] for cost in self._costs.values()), default=0)
        stages: dict[int, tuple[int, float]] = {}
        for reader, cost in sorted(self._costs.items()):
            if (stage := int(reader.partition("/")[0])) < 0:
                continue  # — it continues answers
            rows, seconds = stages.get(stage, (0, 0.0))
            stages[stage] = rows + cost["asked_rows"], seconds + cost["label_seconds"]
        decided: dict[str, Counter[int]] = {}
        for counts in self._counts:
            for task, by_stage in counts.stages.items():
                numbers = {int(stage): rows for stage, rows in by_stage.items()}
                decided.setdefault(task, Counter()).update(numbers)
        taken_over: dict[str, int] = {}
        for counts in self._counts:  # of the work items of a shard, the one that took over most
            taken_over[counts.sid] = max(counts.taken_over, taken_over.get(counts.sid, 0))
        return Tally(
            rows=sum(shard.rows for shard in shards.values()),
            taken_over=sum(taken_over.values()),
            created=self._created,
            status=status,
            labels=labels,
            **(costs | {"asked_rows": asked}),
            stages=stages if decided else {},
            last_stage=self._last_stage,
            decided=decided,
        )

    def _check(self, failed: int, rows: int) -> None:
        if self._limit is None or failed <= self._limit * rows:
            return
        reasons = self.tally.status.most_common()
        shown = ", ".join(f"{name} {count:,}" for name, count in reasons if is_failed_status(name))
        raise FailedRowsError(
            f"{failed:,} of {rows:,} rows failed, more than max_error_rate {self._limit:g} allows"
            f"{shown and f' (in this run: {shown})'}; finished shards are kept, and no snapshot "
            f"was published; remove the cause and run with --retry-failed, or raise max_error_rate"
        )


def is_failed_status(status: str) -> bool:
    """Whether a row with this status should have an answer and has none."""
    return status == QUARANTINED or status.startswith("error:")


def with_retries(job: Job, store: Store, planned: Plan) -> Plan:
    """The plan, with the work that tries failed rows again."""
    retries = retry_items(job, store, planned.shards, planned.done)
    return replace(planned, work_items=(*planned.work_items, *retries))


def retry_items(job: Job, store: Store, shards: Sequence[Shard], done: Committed) -> list[WorkItem]:
    """A work item for each finished shard with readable rows that failed.

    No task is asked again about a row that it answered.
    """
    in_stages = {task.name for task in job.spec.in_stages}
    stages = [
        committed(store, {t: f for t, f in reader.fp.items() if t in in_stages}, None)
        for reader in job.stages
    ]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        items = pool.map(partial(_retry_of, store, [done, *stages]), shards)
        return [item for item in items if item is not None]


def sliced_rows(store: Store, shards: Iterable[Shard], done: Committed) -> dict[str, int]:
    """The rows in the label files of each sliced shard that has one, by shard id."""

    def rows_in(file: str) -> int:
        return int(read_file(store, file, ["doc_id"]).num_rows)

    files = {
        shard.id: done.label_file(task, shard.cell).key
        for shard in shards
        for task in done.fp
        if shard.cell in done.labels[task]
    }
    with ThreadPoolExecutor(READ_THREADS) as pool:
        return dict(zip(files, pool.map(rows_in, files.values()), strict=True))


def _failed_in(store: Store, done: Committed, shard: Shard) -> int:
    """The failed rows of the shard's worst task, from its label files."""
    files = [done.label_file(task, shard.cell) for task in done.fp]
    return max(int(failed_mask(store, file.key).sum()) for file in files)


def failed_rows(counts: ShardCounts) -> int:
    """How many rows of the shard failed."""
    return sum(count for status, count in counts.status.items() if is_failed_status(status))


def _retry_of(store: Store, versions: Sequence[Committed], shard: Shard) -> WorkItem | None:
    """The retry of a shard; of `versions` the first has the tasks' own files, others of stages."""
    cell, done = shard.cell, versions[0]
    tasks = [task for task in done.fp if cell in done.labels[task]]
    if shard.id not in done.documents:
        return None
    readable: frozenset[str] | None = None
    retried = []
    for task in tasks:
        columns = ["doc_id", "status"]
        answers = read_file(store, done.label_file(task, cell).key, columns)
        failed = answers.filter(pa.array(failed_rows_of(answers))).column("doc_id").to_pylist()
        if failed and readable is None:
            documents = read_file(store, done.documents_file(shard.id).key, columns)
            is_ok = pc.equal(documents.column("status").cast(pa.string()), OK)
            readable = frozenset(documents.filter(is_ok).column("doc_id").to_pylist())
        if readable is not None and not readable.isdisjoint(failed):
            retried.append(task)
    if not retried:
        return None
    sources = {
        version_name(task, version.fp[task]): tuple(
            Source(shard.id, version.label_file(task, each).key)
            for each in (version.cells(task, shard.id) if number else [cell])
        )
        for number, version in enumerate(versions)
        for task in retried
        if task in version.fp
    }
    retry = max(done.retry(task, cell) for task in retried) + 1
    return WorkItem(shard, tuple(retried), documents=False, sources=sources, retry=retry)


def failed_mask(store: Store, key: str) -> NDArray[np.bool_]:  # [rows]
    """Which rows of a label file failed."""
    return failed_rows_of(read_file(store, key, ["status"]))


def failed_rows_of(answers: pa.Table) -> NDArray[np.bool_]:  # [rows]
    """Which rows of a label file, of which this has the column `status`, failed."""
    status = answers.column("status").cast(pa.string()).to_pylist()
    return np.array([is_failed_status(each) for each in status], np.bool_)


def _status(store: Store, key: str) -> pa.ChunkedArray:
    return read_file(store, key, ["status"]).column("status").cast(pa.string())
