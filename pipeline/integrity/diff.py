"""What changed between two snapshots: the shares of labels, flipped answers and new failures.

Entry point: `compare`. Two documents are the same if their content hashes are equal.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import computed_field

from pipeline.errors import Option, Problem, SpecError, StorageError, one_line
from pipeline.ledger.cells import stored_version
from pipeline.ledger.dataset import LabelDataset
from pipeline.ledger.snapshots import Contents, SnapshotTask, contents, headers, snapshot_numbers
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.gold import PublishSpec
from pipeline.stores.store import Store

SHOWN_FAILURES = 20
USUAL_PSI = 0.1  # by convention, a smaller value is no shift
USUAL_LIMITS = PublishSpec(max_psi=USUAL_PSI, max_flip_rate=0.05, max_failing=0.05)
# The logarithm of an empty bin is infinite. A count of 0.5 replaces 0 (Jeffreys' prior).
EMPTY_COUNT = 0.5

Counts = NDArray[np.int64]  # [labels]
Connection = duckdb.DuckDBPyConnection


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one snapshot to a task. An answer may have several labels."""

    fp: str
    question: str | None  # of a task that was reworded
    rows: int  # with an answer
    labels: Mapping[str, int]  # rows with the label, so that a repeated text counts each time


@dataclass(frozen=True, slots=True)
class Move:
    """Distinct texts whose label changed; with several labels a text, that gained or lost one."""

    before: str | None
    after: str | None
    texts: int


@dataclass(frozen=True, slots=True)
class TaskChange:
    """One task, before and after. With several labels a text, drift is the largest of a label."""

    before: Answers
    after: Answers  # `labels` are those of both
    changed: tuple[str, ...]  # what differs between the two versions, such as `question`
    psi: float
    texts: int  # distinct texts that both answered
    flipped: int  # of these, texts with other labels
    moves: tuple[Move, ...]  # the most frequent first
    newly_failing: int  # rows that had an answer, matched by document id
    failing_ids: tuple[str, ...]  # the first of them

    @computed_field
    @property
    def flip_rate(self) -> float:
        """The share of the texts with two answers whose labels changed."""
        return self.flipped / self.texts if self.texts else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two snapshots of one output, compared. Also the JSON form."""

    before: str
    after: str
    rows: Mapping[Literal["before", "after"], int]
    texts: Mapping[Literal["before_alone", "both", "after_alone"], int]  # distinct
    tasks: Mapping[str, TaskChange]
    only_before: tuple[str, ...]  # tasks
    only_after: tuple[str, ...]
    # By task with a cascade, the promise of the earlier snapshot that the later one does not keep.
    weaker: Mapping[str, str] = field(default_factory=dict)


def sides(
    store: Store, spec_name: str, before: str | None = None, after: str | None = None
) -> tuple[Contents, Contents]:
    """The snapshots with these numbers, by default the last two of the spec.

    SpecError that lists those that exist.
    """
    existing = sorted(snapshot_numbers(store))
    known = ", ".join(map(str, existing)) or "none yet; `assay run` publishes them"
    own = [str(h["number"]) for h in headers(store, spec_name)] if after is None else []
    if after is None and len(own) < (2 if before is None else 1):
        fix = f"a comparison needs two snapshots of {spec_name}; {store.url} has {known}"
        raise SpecError([Problem(Option("before", "after"), fix)])
    written = {
        "before": own[1] if before is None else before,
        "after": own[0] if after is None else after,
    }
    wrong = [
        Problem(Option(side), f"write the number of a snapshot; {store.url} has {known}", number)
        for side, number in written.items()
        if number.lstrip("0") not in map(str, existing)
    ]
    if wrong:
        raise SpecError(wrong)
    return contents(store, int(written["before"])), contents(store, int(written["after"]))


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
        _database_errors(),
        tempfile.TemporaryDirectory(prefix="assay-diff-") as folder,
        # — the tables are in a file, because they may be larger than the memory
        duckdb.connect(f"{folder}/sides.duckdb") as connection,
    ):
        for side, of in (("a", before), ("b", after)):
            # — a task's name may be a keyword of SQL or another name of the query
            fields = (
                f'{_labels_sql(t, of.tasks[t])} as {t}_labels, "{t}".status as {t}_status'
                for t in common
            )
            query = f"select {', '.join(('doc_id', 'content_hash', *fields))} from _rows"
            rows = LabelDataset(store, of, tuple(common))
            connection.register("_rows", rows.schema.empty_table())
            connection.begin()  # — a transaction for each batch takes much longer
            connection.execute(f"create table {side} as {query}")
            # — not as one stream: a thread of DuckDB would call Python, and get its errors
            for batch in rows.to_batches():
                connection.register("_rows", pa.Table.from_batches([batch]))
                connection.execute(f"insert into {side} {query}")
            connection.commit()
        ((only_a, both, only_b),) = connection.execute(
            "select count(*) filter (y is null), count(*) filter (x = y), count(*) filter "
            "(x is null) from (select distinct content_hash x from a) full join "
            "(select distinct content_hash y from b) on x = y"
        ).fetchall()
        return Comparison(
            before=_name(before),
            after=_name(after),
            rows={"before": before.rows, "after": after.rows},
            texts={"before_alone": only_a, "both": both, "after_alone": only_b},
            tasks={task: _change(store, connection, task, before, after) for task in common},
            only_before=tuple(task for task in before.tasks if task not in after.tasks),
            only_after=tuple(task for task in after.tasks if task not in before.tasks),
            weaker=dict(_weaker(store, before, after)),
        )


def _weaker(store: Store, before: Contents, after: Contents) -> Iterator[tuple[str, str]]:
    """By task of both, which promise of a cascade the later certificate does not keep."""
    for task, earlier in before.certificates.items():
        if earlier.thresholds is None or task not in after.tasks:
            continue
        later = after.certificates.get(task)
        version = stored_version(store, task, after.tasks[task].fp)
        if version.raw.id == earlier.stages[-1] or (later is not None and later.thresholds is None):
            continue  # — the whole model answers everything
        proved = {} if later is None else later.proved_of(earlier.promise)
        lost = [
            f"{name} of {share.promised:g} was promised, and "
            + (f"{proved[name]:.4f} is proved now" if name in proved else "now it is not")
            for name, share in earlier.shares.items()
            if proved.get(name, 0) < share.promised
        ]
        if lost:
            yield task, "; ".join(lost)


@contextmanager
def _database_errors() -> Iterator[None]:
    """Raises DuckDB's errors, such as of a disk without space, as StorageErrors."""
    try:
        yield
    except duckdb.Error as error:
        fix = "set TMPDIR to a folder with more room"
        raise StorageError(f"the snapshots cannot be compared: {one_line(error)}; {fix}") from error


def _labels_sql(task: str, version: SnapshotTask) -> str:
    """The labels of an answer as a list, also of a version that has one label."""
    if "labels" in version.columns:
        return f'"{task}".labels'
    return f'if("{task}".label is null, null, ["{task}".label])'


def _change(
    store: Store, connection: Connection, task: str, before: Contents, after: Contents
) -> TaskChange:
    versions = before.tasks[task], after.tasks[task]
    several = any("labels" in version.columns for version in versions)
    labels = dict.fromkeys((*versions[0].labels, *versions[1].labels))
    contents: list[Fingerprint] = []
    if versions[0].fp != versions[1].fp:
        contents += (stored_version(store, task, version.fp) for version in versions)
    changed = contents[1].changes(contents[0]) if contents else ()
    asked = [of.question for of in contents if "question" in changed]
    was, now = (
        Answers(version.fp, question, *_counts(connection, side, task, labels))
        for side, version, question in zip("ab", versions, asked or (None, None), strict=True)
    )
    texts = flipped = 0
    moves: Counter[tuple[str | None, str | None]] = Counter()
    for x, y, documents in _pairs(connection, task):
        texts += documents
        flipped += documents * ({*x} != {*y})
        gained, lost = {*y}.difference(x), {*x}.difference(y)
        alone = [*((label, None) for label in lost), *((None, label) for label in gained)]
        pairs = alone if several else zip(lost, gained, strict=True)
        moves.update(dict.fromkeys(pairs, documents))
    failing = _failing(connection, task)
    drift = _distributions(was, now, several=several)
    return TaskChange(
        was,
        now,
        changed=changed,
        psi=max(psi(*counts) for counts in drift),
        texts=texts,
        flipped=flipped,
        moves=tuple(Move(*pair, count) for pair, count in moves.most_common()),
        newly_failing=len(failing),
        failing_ids=failing[:SHOWN_FAILURES],
    )


def _distributions(
    before: Answers, after: Answers, *, several: bool
) -> list[tuple[Counts, Counts]]:
    """Rows by label before and after; with several labels a text, with and without each label."""
    x, y = (np.array([*side.labels.values()], np.int64) for side in (before, after))
    if not several:
        return [(x, y)]
    pairs = zip(x, y, strict=True)
    return [(np.array([a, before.rows - a]), np.array([b, after.rows - b])) for a, b in pairs]


def _counts(
    connection: Connection, side: str, task: str, labels: Iterable[str]
) -> tuple[int, dict[str, int]]:
    """The rows of a side with an answer, and those with each of these labels."""
    own = f"{task}_labels"
    query = f"select {own}, count(*) from {side} where {own} is not null group by 1"
    rows, counts = 0, dict.fromkeys(labels, 0)
    for answer, documents in connection.execute(query).fetchall():
        rows += documents
        for label in answer:
            counts[label] += documents
    return rows, counts


def _pairs(connection: Connection, task: str) -> list[tuple[list[str], list[str], int]]:
    """The distinct texts that both sides answered, by both answers."""
    labels = f"{task}_labels"
    # — a text that occurs twice has the same answer each time, and min() takes one of them
    one = f"select content_hash, min({labels}) as l from {{}} where {labels} is not null group by 1"
    query = f"select a.l, b.l, count(*) from ({one.format('a')}) a join ({one.format('b')}) b "
    return connection.execute(query + "using (content_hash) group by all").fetchall()


def _failing(connection: Connection, task: str) -> tuple[str, ...]:
    """The ids of the rows that had an answer and fail now. An empty text does not fail."""
    labels = f"{task}_labels"
    failing = connection.execute(
        f"select doc_id from b where {labels} is null and {task}_status not in ('empty', 'skipped')"
        f" and doc_id in (select doc_id from a where {labels} is not null) order by doc_id"
    ).fetchall()
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


def exceeded(comparison: Comparison, limits: PublishSpec) -> tuple[str, ...]:
    """A reason for each limit that a task exceeds; only tasks of both snapshots are compared."""
    weaker = comparison.weaker.items() if limits.keep_promises else ()
    reasons = [f"the answers of {name} are less certain: {why}" for name, why in weaker]
    for name, change in comparison.tasks.items():
        failing = change.newly_failing / max(1, comparison.rows["after"])
        if limits.max_psi is not None and change.psi > limits.max_psi:
            shift = f"PSI {change.psi:.4f} is above {limits.max_psi:g}"
            reasons.append(f"the labels of {name} shifted: {shift}")
        if limits.max_flip_rate is not None and change.flip_rate > limits.max_flip_rate:
            flips = f"those of {change.flip_rate:.2%} of the shared texts differ"
            limit = f"at most {limits.max_flip_rate:.2%} may"
            reasons.append(f"the answers of {name} flipped: {flips}, and {limit}")
        if limits.max_failing is not None and failing > limits.max_failing:
            reasons.append(
                f"{change.newly_failing:,} rows of {name} had an answer and fail now: "
                f"{failing:.2%} of all is above {limits.max_failing:.2%}"
            )
    return tuple(reasons)
