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
from pipeline.options import Limits
from pipeline.stores.store import Store

SHOWN_FAILURES = 20
# The logarithm of an empty bin is infinite. A count of 0.5 replaces 0 (Jeffreys' prior).
EMPTY_COUNT = 0.5

Counts = NDArray[np.int64]  # [labels]
Flips = NDArray[np.int64]  # [labels before, labels after]
Connection = duckdb.DuckDBPyConnection


@dataclass(frozen=True, slots=True)
class Change:
    """What is counted of a task of any kind, before and after."""

    task: str
    labels: tuple[str, ...]
    fps: tuple[str, str]
    before: Counts  # rows with the label, so that a repeated text counts each time
    after: Counts
    newly_failing: int  # rows that had an answer, matched by document id
    failing_ids: tuple[str, ...]  # the first of them


@dataclass(frozen=True, slots=True)
class TaskChange(Change):
    """One task with one label a document, before and after."""

    flips: Flips  # distinct texts that both answered

    @property
    def psi(self) -> float:
        return psi(self.before, self.after)

    @property
    def jensen_shannon(self) -> float:
        return jensen_shannon(self.before, self.after)

    @property
    def texts(self) -> int:
        """The distinct texts that both answered."""
        return int(self.flips.sum())

    @property
    def flip_rate(self) -> float:
        return flip_rate(self.flips)


@dataclass(frozen=True, slots=True)
class MultiChange(Change):
    """One task of kind `multi`, before and after: each label applies to a document or not."""

    answered: tuple[int, int]  # rows with an answer: before, after
    gained: Counts  # distinct texts that both answered, to which the label applies only after
    lost: Counts  # only before
    flipped: int  # distinct texts that both answered, with other labels
    texts: int  # distinct texts that both answered

    @property
    def psi(self) -> float:
        """The largest of the labels, each against its absence."""
        return max(psi(*sides) for sides in self._by_label())

    @property
    def jensen_shannon(self) -> float:
        """The largest of the labels, each against its absence."""
        return max(jensen_shannon(*sides) for sides in self._by_label())

    @property
    def flip_rate(self) -> float:
        return self.flipped / self.texts if self.texts else 0.0

    def _by_label(self) -> Iterator[tuple[Counts, Counts]]:
        """Of each label: the rows with and without it, before and after."""
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
    tasks: tuple[TaskChange | MultiChange, ...]
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
    is_multi = {t: any("labels" in of.tasks[t].columns for of in (before, after)) for t in common}
    with (
        tempfile.TemporaryDirectory(prefix="assay-diff-") as folder,
        # — the tables are in a file, because they may be larger than the memory
        duckdb.connect(f"{folder}/sides.duckdb") as connection,
    ):
        for side, of in (("a", before), ("b", after)):
            # — a task may be called like a word of SQL or like another name here
            fields = (
                f'{_answer_sql(t, of.tasks[t], multi)} as {t}_label, "{t}".status as {t}_status'
                for t, multi in is_multi.items()
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
            tasks=tuple(
                (_multi_change if multi else _change)(connection, task, before, after)
                for task, multi in is_multi.items()
            ),
            only_before=tuple(task for task in before.tasks if task not in after.tasks),
            only_after=tuple(task for task in after.tasks if task not in before.tasks),
        )


def _rows(connection: Connection, query: str) -> list[tuple[Any, ...]]:
    try:
        return connection.execute(query).fetchall()
    except duckdb.Error as error:
        raise StorageError(f"the two snapshots cannot be compared: {error}") from error


def _answer_sql(task: str, version: SnapshotTask, multi: bool) -> str:
    """The label, or with `multi` the labels, also of a version that has one label."""
    if "labels" in version.columns:
        return f'"{task}".labels'
    label = f'"{task}".label'
    return f"if({label} is null, null, [{label}])" if multi else label


def _change(connection: Connection, task: str, before: Contents, after: Contents) -> TaskChange:
    labels = _labels(task, before, after)
    counted = [dict(_counts(connection, side, task)) for side in "ab"]
    flips = np.zeros((len(labels), len(labels)), dtype=np.int64)
    for x, y, documents in _pairs(connection, task):
        flips[labels.index(x), labels.index(y)] = documents
    failing = _failing(connection, task)
    return TaskChange(
        task=task,
        labels=labels,
        fps=(before.tasks[task].fp, after.tasks[task].fp),
        before=np.array([counted[0].get(label, 0) for label in labels], dtype=np.int64),
        after=np.array([counted[1].get(label, 0) for label in labels], dtype=np.int64),
        flips=flips,
        newly_failing=len(failing),
        failing_ids=failing[:SHOWN_FAILURES],
    )


def _multi_change(
    connection: Connection, task: str, before: Contents, after: Contents
) -> MultiChange:
    labels = _labels(task, before, after)
    counts = np.zeros((2, len(labels)), dtype=np.int64)
    rows = [0, 0]
    for side, name in enumerate("ab"):
        for own, documents in _counts(connection, name, task):
            rows[side] += documents
            counts[side] += documents * np.isin(labels, own)
    gained, lost = np.zeros((2, len(labels)), dtype=np.int64)
    texts = flipped = 0
    for x, y, documents in _pairs(connection, task):
        had, has = np.isin(labels, x), np.isin(labels, y)
        gained += documents * (has & ~had)
        lost += documents * (had & ~has)
        texts += documents
        flipped += documents * bool((had != has).any())
    failing = _failing(connection, task)
    return MultiChange(
        task=task,
        labels=labels,
        fps=(before.tasks[task].fp, after.tasks[task].fp),
        before=counts[0],
        after=counts[1],
        answered=(rows[0], rows[1]),
        gained=gained,
        lost=lost,
        flipped=flipped,
        texts=texts,
        newly_failing=len(failing),
        failing_ids=failing[:SHOWN_FAILURES],
    )


def _labels(task: str, before: Contents, after: Contents) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*before.tasks[task].labels, *after.tasks[task].labels)))


def _counts(connection: Connection, side: str, task: str) -> list[tuple[Any, int]]:
    """The rows of a side by their answer."""
    label = f"{task}_label"
    query = f"select {label}, count(*) from {side} where {label} is not null group by 1"
    return [(answer, rows) for answer, rows in _rows(connection, query)]


def _pairs(connection: Connection, task: str) -> list[tuple[Any, Any, int]]:
    """The distinct texts that both sides answered, by both answers."""
    label = f"{task}_label"
    # — a text that occurs twice has the same answer each time, and min() takes one of them
    one = f"select content_hash, min({label}) as l from {{}} where {label} is not null group by 1"
    query = f"select a.l, b.l, count(*) from ({one.format('a')}) a join ({one.format('b')}) b "
    pairs = _rows(connection, query + "using (content_hash) group by all")
    return [(before, after, texts) for before, after, texts in pairs]


def _failing(connection: Connection, task: str) -> tuple[str, ...]:
    """The ids of the rows that had an answer and fail now. An empty text does not fail."""
    label = f"{task}_label"
    failing = _rows(
        connection,
        f"select doc_id from b where {label} is null and {task}_status not in ('empty', 'skipped') "
        f"and doc_id in (select doc_id from a where {label} is not null) order by doc_id",
    )
    return tuple(doc_id for (doc_id,) in failing)


def _name(snapshot: Contents) -> str:
    part = f" ({snapshot.slice})" if snapshot.slice else ""
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


def flip_rate(flips: Flips) -> float:
    """The share of the documents with two answers whose label changed."""
    before, after = flips.shape
    assert before == after, flips.shape
    total = flips.sum()
    return float(1 - np.trace(flips) / total) if total else 0.0


def exceeded(comparison: Comparison, limits: Limits) -> tuple[str, ...]:
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
