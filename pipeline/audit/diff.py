"""What changed between two answerings of a corpus: labels' shares, answers that flipped, failures.

Documents are the same where their content hash is. Knows SQL over the rows of `open_labels`. Knows
nothing of how much change is too much or of how it is shown.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.errors import Problem, SpecError, StorageError
from pipeline.evaluation.drift import flip_rate, jensen_shannon, psi
from pipeline.ledger.cells import committed
from pipeline.ledger.columns import columns_with
from pipeline.ledger.contents import Contents, contents, contents_of
from pipeline.ledger.dataset import LabelDataset
from pipeline.ledger.keys import label_folders, parse_key, spec_key
from pipeline.ledger.label_files import METADATA_PREFIX
from pipeline.ledger.snapshots import SnapshotTask
from pipeline.sources.shards import Shard
from pipeline.stores.store import Store

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


FORM = "write a snapshot's number, or fp:TASK:FINGERPRINT"
_VERSION = re.compile(r"fp:(?P<task>[a-z][a-z0-9_]*):(?P<fp>[0-9a-f]{16})")


def side(store: Store, written: str) -> Contents:
    """What a side names; SpecError if it is no name, StorageError if there is nothing of it."""
    if written.isascii() and written.isdecimal():
        return contents(store, int(written))
    found = _VERSION.fullmatch(written)
    if found is None:
        raise SpecError([Problem("A or B", FORM, written)])
    return version_contents(store, found["task"], found["fp"])


def version_contents(store: Store, task: str, fp: str) -> Contents:
    """All that is there of one version of a task, whatever snapshot it is in, or in none.

    It has the shards of earlier versions of an input file, too.
    """
    folders = label_folders(task, fp)
    keys = [parse_key(stored.key) for folder in folders for stored in store.list(folder)]
    sids = {key.sid for key in keys if key}
    if not sids:
        raise StorageError(f"{store.url}/{folders[0]}: has no answers; {FORM}")
    done = committed(store, {task: fp}, sids)
    there = sorted(sid for sid in sids if sid in done.documents and sid in done.labels[task])
    shards = sorted((_shard(store, done.documents_file(s).key) for s in there), key=_place)
    version = _version(json.loads(store.read(spec_key(task, fp))), fp)
    return contents_of(f"fp:{task}:{fp}", {task: version}, shards, done)


def _version(words: Mapping[str, Any], fp: str) -> SnapshotTask:
    """What a fingerprint's words say of the task's files."""
    asked = words["task"]
    columns = columns_with(
        ranked="top_k" in asked, levels="separator" in asked, calibrated="calibration" in words
    )
    return SnapshotTask(fp, tuple(label for label, _ in asked["labels"]), columns)


def _shard(store: Store, key: str) -> Shard:
    """The shard that a documents file says it is of."""
    try:
        metadata = pq.read_schema(pa.BufferReader(store.read(key))).metadata
        return Shard.from_json(json.loads(metadata[f"{METADATA_PREFIX}shard".encode()]))
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"{store.url}/{key}: is not a documents file: {error!r}; `assay verify` tells more"
        ) from error


def _place(shard: Shard) -> tuple[str, int]:
    return shard.path, shard.piece.start_row
