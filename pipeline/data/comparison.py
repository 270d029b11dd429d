"""What changed between two answerings of a corpus: labels' shares, answers that flipped, failures.

Documents are the same where their content hash is. Knows SQL over the rows of `open_labels`. Knows
nothing of how much change is too much or of how it is shown.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import duckdb
import numpy as np
from numpy.typing import NDArray

from pipeline.data.contents import Contents
from pipeline.data.labels import LabelDataset
from pipeline.data.storage import Store
from pipeline.errors import Problem, SpecError, StorageError
from pipeline.evaluation.drift import flip_rate, jensen_shannon, psi

SHOWN_FAILURES = 20

By = Literal["path"]


@dataclass(frozen=True, slots=True)
class Group:
    """The shared documents of one group, and how many of them flipped."""

    documents: int
    flipped: int

    @property
    def flip_rate(self) -> float:
        return self.flipped / self.documents if self.documents else 0.0


@dataclass(frozen=True, slots=True)
class TaskChange:
    """One task, before and after."""

    task: str
    labels: tuple[str, ...]
    fps: tuple[str, str]
    before: NDArray[np.int64]  # [labels]: documents, each time that they occur
    after: NDArray[np.int64]  # [labels]
    flips: NDArray[np.int64]  # [labels before, labels after]: documents that both have, once
    newly_failing: int  # rows that had an answer, by their id
    failing_ids: tuple[str, ...]  # the first of them
    groups: Mapping[str, Group]

    @property
    def psi(self) -> float:
        return psi(self.before, self.after)

    @property
    def jensen_shannon(self) -> float:
        return jensen_shannon(self.before, self.after)

    @property
    def flip_rate(self) -> float:
        return flip_rate(self.flips)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answerings of a corpus."""

    before: str
    after: str
    rows: tuple[int, int]
    documents: tuple[int, int, int]  # distinct texts: of before alone, of both, of after alone
    tasks: tuple[TaskChange, ...]
    only_before: tuple[str, ...]  # tasks
    only_after: tuple[str, ...]


def compare(store: Store, before: Contents, after: Contents, by: By | None = None) -> Comparison:
    """What changed; both are of the same store."""
    common = [task for task in after.tasks if task in before.tasks]
    with _database(store, before, after, common) as database:
        return Comparison(
            before=_name(before),
            after=_name(after),
            rows=(before.rows, after.rows),
            documents=_documents(database),
            tasks=tuple(_change(database, task, before, after, by) for task in common),
            only_before=tuple(task for task in before.tasks if task not in after.tasks),
            only_after=tuple(task for task in after.tasks if task not in before.tasks),
        )


class _Database:
    """DuckDB, and the two sides as the tables `a` and `b`."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query).fetchall()
        except duckdb.Error as error:
            raise StorageError(f"the two cannot be compared: {error}") from error


@contextmanager
def _database(
    store: Store, before: Contents, after: Contents, tasks: Sequence[str]
) -> Iterator[_Database]:
    if not tasks:
        told = (f"{_name(found)} has {', '.join(found.tasks)}" for found in (before, after))
        raise SpecError([Problem("A and B", "have no task in common", "; ".join(told))])
    with (
        tempfile.TemporaryDirectory(prefix="assay-diff-") as folder,
        # — what the memory does not hold of a large join goes there
        duckdb.connect(":memory:", config={"temp_directory": folder}) as connection,
    ):
        for name, found in (("a", before), ("b", after)):
            connection.register(name, LabelDataset(store, found, list(tasks)))
        yield _Database(connection)


def _documents(database: _Database) -> tuple[int, int, int]:
    ((of_a, both, of_b),) = database.rows(
        "select count(*) filter (y is null), count(*) filter (x = y), count(*) filter (x is null) "
        "from (select distinct content_hash x from a) full join "
        "(select distinct content_hash y from b) on x = y"
    )
    return of_a, both, of_b


def _change(
    database: _Database, task: str, before: Contents, after: Contents, by: By | None
) -> TaskChange:
    versions = before.tasks[task], after.tasks[task]
    labels = tuple(dict.fromkeys((*versions[0].labels, *versions[1].labels)))
    flips = np.zeros((len(labels), len(labels)), dtype=np.int64)
    groups: dict[str, list[int]] = {}
    for group, x, y, documents in database.rows(_shared(task, by)):
        flips[labels.index(x), labels.index(y)] += documents
        counts = groups.setdefault(group, [0, 0])
        counts[0] += documents
        counts[1] += documents * (x != y)
    failing = database.rows(_failing(task))
    return TaskChange(
        task=task,
        labels=labels,
        fps=(versions[0].fp, versions[1].fp),
        before=_counts(database, "a", task, labels),
        after=_counts(database, "b", task, labels),
        flips=flips,
        newly_failing=len(failing),
        failing_ids=tuple(doc_id for (doc_id,) in failing[:SHOWN_FAILURES]),
        groups={g: Group(*counts) for g, counts in sorted(groups.items())} if by else {},
    )


def _counts(database: _Database, table: str, task: str, labels: Sequence[str]) -> NDArray[np.int64]:
    label = _label(task)
    query = f"select {label}, count(*) from {table} where {label} is not null group by 1"
    found = dict(database.rows(query))
    return np.array([found.get(label, 0) for label in labels], dtype=np.int64)


def _shared(task: str, by: By | None) -> str:
    """Of the texts that both sides answered: group, label before, label after, how many."""
    # — a text that stands in the corpus twice has one answer; min() makes it so in any case
    one = "select content_hash h, min({label}) l, min(path) g from {table} where {label} "
    one += "is not null group by content_hash"
    a, b = (one.format(label=_label(task), table=table) for table in "ab")
    group = "b.g" if by else "''"
    return f"select {group}, a.l, b.l, count(*) from ({a}) a join ({b}) b using (h) group by all"


def _failing(task: str) -> str:
    """The ids of rows that fail after and had an answer before; an empty text does not fail."""
    label, status = _label(task), _field(task, "status")
    return (
        f"select doc_id from b where {label} is null and {status} <> 'empty' and doc_id "
        f"in (select doc_id from a where {label} is not null) order by doc_id"
    )


def _label(task: str) -> str:
    return _field(task, "label")


def _field(task: str, name: str) -> str:
    """Quoted, for a task may be called `order`; a task's name has no quotes of its own."""
    return f'"{task}"."{name}"'


def _name(found: Contents) -> str:
    if found.number:
        return f"snapshot {found.number:08d}"
    return found.spec if found.spec.startswith("fp:") else "unpublished"
