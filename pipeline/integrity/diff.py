"""What changed between two snapshots: the shares of labels, flipped answers and new failures.

Entry point: `compare`. Two documents are the same if their content hashes are equal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.special import rel_entr

from pipeline.errors import Option, Problem, SpecError, StorageError
from pipeline.ledger.dataset import LabelDataset
from pipeline.ledger.snapshots import Contents, SnapshotTask, contents, snapshot_numbers
from pipeline.spec.gold import PublishSpec
from pipeline.stores.store import Store

SHOWN_FAILURES = 20
USUAL_PSI = 0.1  # below it, by convention, is no shift
USUAL_LIMITS = PublishSpec(max_psi=USUAL_PSI, max_flip_rate=0.05, max_failing=0.05)
# The logarithm of an empty bin is infinite. A count of 0.5 replaces 0 (Jeffreys' prior).
EMPTY_COUNT = 0.5

Counts = NDArray[np.int64]  # [labels]
Flips = NDArray[np.int64]  # [labels before, labels after]
Connection = duckdb.DuckDBPyConnection


@dataclass(frozen=True, slots=True)
class TaskChange:
    """One task, before and after. An answer is a set of labels; of most kinds, of one label."""

    task: str
    labels: tuple[str, ...]
    fps: tuple[str, str]
    before: Counts  # rows with the label, so that a repeated text counts each time
    after: Counts
    answered: tuple[int, int]  # rows with an answer: before, after
    newly_failing: int  # rows that had an answer, matched by document id
    failing_ids: tuple[str, ...]  # the first of them
    texts: int  # distinct texts that both answered
    flipped: int  # of these, texts with other labels
    gained: Counts  # of these, texts that have the label only after
    lost: Counts  # only before
    flips: Flips | None  # of these, texts by both labels; None: a text may have several labels

    @property
    def psi(self) -> float:
        """With several labels a text, the largest of the labels, each against its absence."""
        return max(psi(*sides) for sides in self._distributions())

    @property
    def jensen_shannon(self) -> float:
        """With several labels a text, the largest of the labels, each against its absence."""
        return max(jensen_shannon(*sides) for sides in self._distributions())

    @property
    def flip_rate(self) -> float:
        """The share of the texts with two answers whose labels changed."""
        return self.flipped / self.texts if self.texts else 0.0

    def _distributions(self) -> Iterator[tuple[Counts, Counts]]:
        """Rows by label before and after; with several labels a text, with and without each."""
        if self.flips is not None:
            yield self.before, self.after
            return
        rows_before, rows_after = self.answered
        for before, after in zip(self.before, self.after, strict=True):
            yield np.array([before, rows_before - before]), np.array([after, rows_after - after])


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two snapshots of one output, compared."""

    before: str
    after: str
    rows: tuple[int, int]
    documents: tuple[int, int, int]  # distinct texts: only before, in both, only after
    tasks: tuple[TaskChange, ...]
    only_before: tuple[str, ...]  # tasks
    only_after: tuple[str, ...]


def sides(store: Store, before: str, after: str) -> tuple[Contents, Contents]:
    """The snapshots with these numbers; SpecError that lists those that exist."""
    written = {"before": before, "after": after}
    existing = sorted(snapshot_numbers(store))
    known = ", ".join(map(str, existing)) or "none yet; `assay run` publishes them"
    wrong = [
        Problem(Option(side), f"write the number of a snapshot; {store.url} has {known}", number)
        for side, number in written.items()
        if not (number.isascii() and number.isdecimal() and int(number) in existing)
    ]
    if wrong:
        raise SpecError(wrong)
    return contents(store, int(before)), contents(store, int(after))


def compare(store: Store, before: Contents, after: Contents) -> Comparison:
    """What changed between two snapshots of the store. Each label file is read once."""
    common = [task for task in after.tasks if task in before.tasks]
    if not common:
        place = Option("before", "after")
        names = (
            f"{_name(snapshot)} has {', '.join(snapshot.tasks)}" for snapshot in (before, after)
        )
        raise SpecError([Problem(place, "have no task in common", "; ".join(names))])
    with (
        tempfile.TemporaryDirectory(prefix="assay-diff-") as folder,
        # — the tables are in a file, because they may be larger than the memory
        duckdb.connect(f"{folder}/sides.duckdb") as connection,
    ):
        for side, of in (("a", before), ("b", after)):
            # — a task may be called like a word of SQL or like another name here
            fields = (
                f'{_labels_sql(t, of.tasks[t])} as {t}_labels, "{t}".status as {t}_status'
                for t in common
            )
            query = f"select {', '.join(('doc_id', 'content_hash', *fields))} from _rows"
            rows = LabelDataset(store, of, tuple(common))
            connection.register("_rows", rows.schema.empty_table())
            connection.begin()  # — a transaction for each batch takes much longer
            _rows(connection, f"create table {side} as {query}")
            # — not as one stream: a thread of DuckDB would call Python, and get its errors
            for batch in rows.to_batches():
                connection.register("_rows", pa.Table.from_batches([batch]))
                _rows(connection, f"insert into {side} {query}")
            connection.commit()
        ((only_a, both, only_b),) = _rows(
            connection,
            "select count(*) filter (y is null), count(*) filter (x = y), count(*) filter "
            "(x is null) from (select distinct content_hash x from a) full join "
            "(select distinct content_hash y from b) on x = y",
        )
        return Comparison(
            before=_name(before),
            after=_name(after),
            rows=(before.rows, after.rows),
            documents=(only_a, both, only_b),
            tasks=tuple(_change(connection, task, before, after) for task in common),
            only_before=tuple(task for task in before.tasks if task not in after.tasks),
            only_after=tuple(task for task in after.tasks if task not in before.tasks),
        )


def _rows(connection: Connection, query: str) -> list[tuple[Any, ...]]:
    try:
        return connection.execute(query).fetchall()
    except duckdb.Error as error:
        raise StorageError(f"the two snapshots cannot be compared: {error}") from error


def _labels_sql(task: str, version: SnapshotTask) -> str:
    """The labels of an answer as a list, also of a version that has one label."""
    if "labels" in version.columns:
        return f'"{task}".labels'
    return f'if("{task}".label is null, null, ["{task}".label])'


def _change(connection: Connection, task: str, before: Contents, after: Contents) -> TaskChange:
    versions = before.tasks[task], after.tasks[task]
    labels = tuple(dict.fromkeys((*versions[0].labels, *versions[1].labels)))
    index = {label: number for number, label in enumerate(labels)}
    counts = np.zeros((2, len(labels)), np.int64)
    gained, lost = np.zeros_like(counts)
    rows = [0, 0]
    for side, name in enumerate("ab"):
        for own, documents in _counts(connection, name, task):
            rows[side] += documents
            counts[side, [index[label] for label in own]] += documents
    has_several = any("labels" in version.columns for version in versions)
    flips = None if has_several else np.zeros((len(labels), len(labels)), np.int64)
    texts = flipped = 0
    for x, y, documents in _pairs(connection, task):
        texts += documents
        flipped += documents * ({*x} != {*y})
        gained[[index[label] for label in {*y}.difference(x)]] += documents
        lost[[index[label] for label in {*x}.difference(y)]] += documents
        if flips is not None:
            flips[index[x[0]], index[y[0]]] += documents
    failing = _failing(connection, task)
    return TaskChange(
        task=task,
        labels=labels,
        fps=(versions[0].fp, versions[1].fp),
        before=counts[0],
        after=counts[1],
        answered=(rows[0], rows[1]),
        newly_failing=len(failing),
        failing_ids=failing[:SHOWN_FAILURES],
        texts=texts,
        flipped=flipped,
        gained=gained,
        lost=lost,
        flips=flips,
    )


def _counts(connection: Connection, side: str, task: str) -> list[tuple[list[str], int]]:
    """The rows of a side by their labels."""
    labels = f"{task}_labels"
    query = f"select {labels}, count(*) from {side} where {labels} is not null group by 1"
    return [(answer, rows) for answer, rows in _rows(connection, query)]


def _pairs(connection: Connection, task: str) -> list[tuple[list[str], list[str], int]]:
    """The distinct texts that both sides answered, by both answers."""
    labels = f"{task}_labels"
    # — a text that occurs twice has the same answer each time, and min() takes one of them
    one = f"select content_hash, min({labels}) as l from {{}} where {labels} is not null group by 1"
    query = f"select a.l, b.l, count(*) from ({one.format('a')}) a join ({one.format('b')}) b "
    pairs = _rows(connection, query + "using (content_hash) group by all")
    return [(before, after, texts) for before, after, texts in pairs]


def _failing(connection: Connection, task: str) -> tuple[str, ...]:
    """The ids of the rows that had an answer and fail now. An empty text does not fail."""
    labels = f"{task}_labels"
    failing = _rows(
        connection,
        f"select doc_id from b where {labels} is null and {task}_status not in ('empty', 'skipped')"
        f" and doc_id in (select doc_id from a where {labels} is not null) order by doc_id",
    )
    return tuple(doc_id for (doc_id,) in failing)


def _name(snapshot: Contents) -> str:
    part = f" ({snapshot.limit})" if snapshot.limit else ""
    return f"snapshot {snapshot.number:08d}{part}" if snapshot.number else "unpublished"


def shares(counts: Counts) -> NDArray[np.float64]:
    """Each label's share of all counts; zeros if all counts are 0."""
    (labels,) = counts.shape
    total = counts.sum()
    return counts / total if total else np.zeros(labels)


def psi(before: Counts, after: Counts) -> float:
    """The population stability index: the sum of (q - p) ln(q / p) over the labels, in nats.

    It is symmetric, and 0 for equal shares. By convention a value below 0.1 is stable, and above
    0.25 is a shift (Siddiqi 2006, "Credit Risk Scorecards"). A count of 0 is taken as 0.5.
    """
    p, q = (shares(np.where(counts > 0, counts, EMPTY_COUNT)) for counts in (before, after))
    if not before.sum() or not after.sum():
        return 0.0
    return float(((q - p) * np.log(q / p)).sum())


def jensen_shannon(before: Counts, after: Counts) -> float:
    """The Jensen-Shannon divergence in bits, from 0 to 1 (Lin 1991); 0 if one side is empty."""
    if not before.sum() or not after.sum():
        return 0.0
    p, q = shares(before), shares(after)
    divergence = (rel_entr(p, (p + q) / 2) + rel_entr(q, (p + q) / 2)).sum() / (2 * np.log(2))
    # — of nearly equal shares it is below 0 by rounding, and scipy's `jensenshannon` NaN
    return float(max(divergence, 0.0))


def exceeded(comparison: Comparison, limits: PublishSpec) -> tuple[str, ...]:
    """A reason for each limit that a task exceeds; only tasks of both snapshots are compared."""
    reasons = []
    for change in comparison.tasks:
        name, failing = change.task, change.newly_failing / max(1, comparison.rows[1])
        if limits.max_psi is not None and change.psi > limits.max_psi:
            shift = f"PSI {change.psi:.4f} is above {limits.max_psi:g}"
            reasons.append(f"the labels of {name} shifted: {shift}")
        if limits.max_flip_rate is not None and change.flip_rate > limits.max_flip_rate:
            flips = (
                f"{change.flip_rate:.2%} of the shared texts is above {limits.max_flip_rate:.2%}"
            )
            reasons.append(f"the answers of {name} flipped: {flips}")
        if limits.max_failing is not None and failing > limits.max_failing:
            reasons.append(
                f"{change.newly_failing:,} rows of {name} had an answer and fail now: "
                f"{failing:.2%} of all is above {limits.max_failing:.2%}"
            )
    return tuple(reasons)
