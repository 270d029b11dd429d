"""Snapshots: numbered, consistent views of finished work. The highest number is current.

Entry points: `publish` writes a snapshot, and `contents` reads one.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby, zip_longest
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import StorageError
from pipeline.hashes import canonical_json, parse_json
from pipeline.ledger.cells import Committed, is_whole
from pipeline.ledger.columns import ANSWER_COLUMNS
from pipeline.ledger.failed_rows import NO_COUNTS, Counts, FileCounts, complete_counts, merged
from pipeline.ledger.keys import is_part, manifest_key, snapshot_key
from pipeline.ledger.numbered import append_numbered, numbers
from pipeline.sources.shards import Shard, Slice, fields_of
from pipeline.stores.store import Store

# A snapshot of more shards has its files in a manifest, in row groups of this many shards.
TABLE_SHARDS = 10_000

_OF_SHARD = ("path", "start_row", "end_row")
_COUNTED = ("task", "sid", "etag", "failed", "taken_over")
_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("sid", "task", "key", "etag")),  # task null: documents
        *((name, pa.int64()) for name in ("rows", "failed", "taken_over")),  # of labels, if counted
        *zip(_OF_SHARD, (pa.string(), pa.int64(), pa.int64()), strict=True),
    ]
)
_NAMED = [name for name in _SCHEMA.names if name not in ("failed", "taken_over")]


@dataclass(frozen=True, slots=True)
class SnapshotTask:
    """A task in a snapshot: its version, its labels in order, and its files' columns."""

    fp: str
    labels: tuple[str, ...]
    columns: tuple[str, ...] = ANSWER_COLUMNS

    def to_json(self) -> dict[str, object]:
        """The JSON form. Default columns are left out, so older snapshots keep their form."""
        return {k: v for k, v in asdict(self).items() if k != "columns" or v != ANSWER_COLUMNS}


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file as a snapshot names it."""

    key: str
    etag: str
    rows: int
    sid: str
    task: str | None  # None: the documents file


@dataclass(frozen=True, slots=True)
class NamedShard:
    """A shard as a snapshot names it, with its files."""

    sid: str
    path: str
    start_row: int
    rows: int
    documents: NamedFile
    labels: Mapping[str, NamedFile]  # by task
    # Whether its label files have some rows of the shard; they name them. In snapshots of earlier
    # versions the documents file has these rows alone, and names them.
    sliced: bool = False

    @property
    def has_own_documents(self) -> bool:
        """Whether the documents file is of the slice, as earlier versions wrote it."""
        return self.sliced and not any(is_part(file.key) for file in self.labels.values())

    @property
    def files(self) -> tuple[NamedFile, ...]:
        """Its documents file, then a label file for each task."""
        return (self.documents, *self.labels.values())


@dataclass(frozen=True, slots=True)
class Contents:
    """A snapshot: its tasks, and its shards in the input's order."""

    number: int
    spec: str
    tasks: Mapping[str, SnapshotTask]
    shards: tuple[NamedShard, ...]
    missing_rows: int = 0  # of a partial snapshot: rows of the input that it leaves out
    missing_files: int = 0  # of a partial snapshot: input files whose rows are not counted
    created_at: str = field(default="", compare=False)  # ISO 8601; "" if it is not published
    slice: Slice | None = None  # the documents that it was limited to

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def files(self) -> Iterator[NamedFile]:
        """All files, shard by shard."""
        return (file for shard in self.shards for file in shard.files)


def publish(
    store: Store,
    spec_name: str,
    tasks: Mapping[str, SnapshotTask],
    shards: Sequence[Shard],
    done: Committed,
    *,
    created_at: str,
    partial: bool = False,
    missing_files: int = 0,
    slice_rows: Mapping[str, int] | None = None,
    counts: Counts = NO_COUNTS,
) -> int:
    """The number of the snapshot of this work: a new one, unless the spec's last is the same.

    A partial snapshot leaves out incomplete shards and counts their rows. `missing_files` is the
    number of input files whose rows cannot be counted. Sliced shards have the rows of `slice_rows`,
    by shard id; their snapshot is never complete. A label file is read if neither `counts` nor the
    last snapshot counts its rows. StorageError if work is missing and the snapshot is not partial.
    """
    whole = [shard for shard in shards if is_whole(shard, tasks, done)]
    rows = [shard.rows if slice_rows is None else slice_rows[shard.id] for shard in whole]
    all_shards = len(whole) == len(shards) and not missing_files
    if not partial and not all_shards:
        raise StorageError(f"{store.url}: the work is not complete, so it has no snapshot")
    part = shards[0].slice if shards else None
    header: dict[str, Any] = {
        "complete": all_shards and part is None,
        "missing_files": missing_files,
        "missing_rows": sum(shard.rows for shard in shards) - sum(rows),
        "rows": sum(rows),
        "spec": spec_name,
        "tasks": {name: task.to_json() for name, task in tasks.items()},
        # — without a slice there is no such key, so snapshots keep their form
        **({} if part is None else {"slice": part.to_json()}),
    }
    named = tuple(zip(whole, rows, strict=True))
    published = 0

    def write(number: int) -> bool:
        nonlocal published, counts
        last = last_published(store, spec_name, skip_damaged=True)
        if last is not None and _shows(store, last, header, _tables(named, tasks, done)):
            published = last["number"]
            return True
        published = number
        counts = merged(counts_in(store, last, done), counts)
        counts = complete_counts(store, done, [shard.cell for shard in whole], counts)
        content = header | {"created_at": created_at, "number": number}
        return _create(store, content, _tables(named, tasks, done, counts))

    append_numbered(store, snapshot_key, write)
    return published


def contents(store: Store, number: int | None = None) -> Contents:
    """Snapshot `number`, or the current one; StorageError if there is none or it is invalid."""
    existing = snapshot_numbers(store) if number is None else [number]
    if not existing:
        raise StorageError(
            f"{store.url}: has no snapshot yet; `assay run` publishes one when its work is complete"
        )
    content = read_snapshot(store, existing[0])
    with _parsing(store, existing[0]):
        tasks = {
            name: SnapshotTask(
                task["fp"], tuple(task["labels"]), tuple(task.get("columns", ANSWER_COLUMNS))
            )
            for name, task in content["tasks"].items()
        }
        part = Slice(**content["slice"]) if "slice" in content else None
        tables = _files(store, content)
        return Contents(
            number=int(content["number"]),
            spec=str(content["spec"]),
            tasks=tasks,
            shards=tuple(s for table in tables for s in _shards(table, tasks, bool(part))),
            missing_rows=int(content.get("missing_rows", 0)),
            missing_files=int(content.get("missing_files", 0)),
            slice=part,
            created_at=str(content.get("created_at", "")),
        )


def last_contents(store: Store, spec_name: str) -> Contents:
    """The spec's last snapshot; the current one may be of another spec."""
    number = last_snapshot(store, spec_name)
    if number is None:
        raise StorageError(
            f"{store.url}: has no snapshot of {spec_name} yet; `assay run` publishes one"
        )
    return contents(store, number)


def contents_of(
    spec_name: str,
    tasks: Mapping[str, SnapshotTask],
    shards: Sequence[Shard],
    done: Committed,
    slice_rows: Mapping[str, int] | None = None,
) -> Contents:
    """The snapshot that this complete work would have; its number is 0, which no snapshot has."""
    sliced = slice_rows is not None
    named = [(s, s.rows if slice_rows is None else slice_rows[s.id]) for s in shards]
    tables = _tables(named, tasks, done)
    shown = tuple(each for table in tables for each in _shards(table, tasks, sliced))
    return Contents(0, spec_name, tasks, shown)


def last_snapshot(store: Store, spec_name: str) -> int | None:
    """The number of the spec's last snapshot, or None; StorageError if a later one is cut off."""
    last = last_published(store, spec_name)
    return None if last is None else int(last["number"])


def last_published(
    store: Store, spec_name: str, *, skip_damaged: bool = False
) -> dict[str, Any] | None:
    """The spec's last snapshot as `read_snapshot` gives it, or None; later ones are of others.

    StorageError if a later one is cut off, so that its spec is not known; or it is skipped.
    """
    for number in snapshot_numbers(store):
        snapshot = _json(store.read(snapshot_key(number)))
        if snapshot is None and not skip_damaged:
            return read_snapshot(store, number)
        if snapshot is not None and snapshot.get("spec") == spec_name:
            return snapshot
    return None


def read_snapshot(store: Store, number: int) -> dict[str, Any]:
    """One snapshot's JSON; of a snapshot with a manifest, it names no files."""
    key = snapshot_key(number)
    snapshot = _json(store.read(key))
    if snapshot is None:
        raise StorageError(
            f"{store.url}/{key}: is not JSON, or is cut off; restore it, or delete it and publish "
            f"it again with `assay run`"
        )
    return snapshot


def snapshot_numbers(store: Store) -> list[int]:
    """The numbers of all snapshots, the current one first."""
    return numbers(store, snapshot_key)[::-1]


def counts_in(store: Store, snapshot: Mapping[str, Any] | None, done: Committed) -> Counts:
    """The counts in a snapshot of the label files that `done` has."""
    counts: dict[str, dict[str, FileCounts]] = {task: {} for task in done.fp}
    if snapshot is None:
        return counts
    same = [t for t, fp in done.fp.items() if snapshot["tasks"].get(t, {}).get("fp") == fp]
    part = Slice(**snapshot["slice"]) if "slice" in snapshot else None
    interned: dict[FileCounts, FileCounts] = {}  # — a million equal tuples are kept once
    for table in _files(store, snapshot):
        labels = table.filter(pc.is_in(table["task"], pa.array(same, pa.string())))
        columns = labels.filter(labels["failed"].is_valid()).select(_COUNTED).to_pydict()
        for task, sid, etag, failed, taken_over in zip(*columns.values(), strict=True):
            cell = sid if part is None else f"{sid}.{part.name}"
            if cell in done.labels[task] and done.label_file(task, cell).etag == etag:
                own = FileCounts(done.retry(task, cell), failed, taken_over)
                counts[task][cell] = interned.setdefault(own, own)
    return counts


def _json(data: bytes) -> dict[str, Any] | None:
    """The JSON object, or None."""
    with suppress(ValueError):
        return content if isinstance(content := parse_json(data), dict) else None
    return None


def _tables(
    named: Sequence[tuple[Shard, int]],
    tasks: Iterable[str],
    done: Committed,
    counts: Counts = NO_COUNTS,
) -> Iterator[pa.Table]:
    """The files of all shards with their rows, in tables of `TABLE_SHARDS` shards each."""
    for start in range(0, len(named), TABLE_SHARDS):
        rows = []
        for shard, count in named[start : start + TABLE_SHARDS]:
            of_shard = {
                "sid": shard.id,
                "path": shard.path,
                "start_row": shard.piece.start_row,
                "end_row": shard.piece.end_row,
            }
            rows.append(fields_of(done.documents_file(shard.id)) | {"rows": shard.rows} | of_shard)
            for task in tasks:
                file = fields_of(done.label_file(task, shard.cell))
                own = counts.get(task, {}).get(shard.cell)
                counted = {} if own is None else own._asdict()
                rows.append({"task": task, "rows": count} | file | counted | of_shard)
        yield pa.Table.from_pylist(rows, _SCHEMA)


def _create(store: Store, content: dict[str, Any], tables: Iterator[pa.Table]) -> bool:
    """Creates the manifest, if there is one, then the snapshot; False if its number is taken."""
    number, first = content["number"], next(tables, _SCHEMA.empty_table())
    second = next(tables, None)
    if second is None:
        files = [{k: v for k, v in each.items() if v is not None} for each in first.to_pylist()]
        content["files"] = [
            {"task": None} | {k: v for k, v in each.items() if k not in _OF_SHARD} for each in files
        ]
        shards = {each["sid"]: each for each in files}  # of a slice, label files have its rows
        content["shards"] = [
            {name: each[name] for name in ("sid", "rows", *_OF_SHARD)} for each in shards.values()
        ]
        return store.create(snapshot_key(number), canonical_json(content))
    # — a row group at a time: all of them as tables would fill the memory
    buffer = io.BytesIO()
    repeated = ["sid", "task", "path"]
    with pq.ParquetWriter(buffer, _SCHEMA, compression="zstd", use_dictionary=repeated) as writer:
        for table in chain((first, second), tables):
            writer.write_table(table, row_group_size=table.num_rows)
    content["manifest"] = manifest_key(number)
    return store.create(content["manifest"], buffer.getvalue()) and store.create(
        snapshot_key(number), canonical_json(content)
    )


def _files(store: Store, snapshot: Mapping[str, Any]) -> Iterator[pa.Table]:
    """The files that a snapshot names, in the tables of `_tables`."""
    with _parsing(store, snapshot.get("number", 0)):
        if "manifest" in snapshot:
            manifest = pq.ParquetFile(pa.BufferReader(store.read(snapshot["manifest"])))
            for group in range(manifest.num_row_groups):
                yield manifest.read_row_group(group, use_threads=False)
        elif snapshot["shards"]:
            files: dict[str, list[dict[str, Any]]] = {}
            for file in snapshot["files"]:
                files.setdefault(file["sid"], []).append(file)
            rows = [shard | file for shard in snapshot["shards"] for file in files[shard["sid"]]]
            yield pa.Table.from_pylist(rows, _SCHEMA)


@contextmanager
def _parsing(store: Store, number: int) -> Iterator[None]:
    """A snapshot without what it must have is a StorageError."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise StorageError(
            f"{store.url}/{snapshot_key(number)}: is not a snapshot: {error!r}; "
            f"restore it, or delete it and publish it again with `assay run`"
        ) from error


def _shows(
    store: Store, snapshot: Mapping[str, Any], header: Mapping[str, Any], new: Iterator[pa.Table]
) -> bool:
    """Whether the snapshot shows the same work; its number, time and counts may differ."""
    expected = {"slice": None} | parse_json(canonical_json(header))
    return all(snapshot.get(name) == value for name, value in expected.items()) and all(
        was is not None and now is not None and was.select(_NAMED).equals(now.select(_NAMED))
        for was, now in zip_longest(_files(store, snapshot), new)
    )


def _shards(table: pa.Table, tasks: Iterable[str], sliced: bool = False) -> Iterator[NamedShard]:
    """The shards of a table, whose files follow one another."""
    for _, files in groupby(table.to_pylist(), itemgetter("sid")):
        by_task = {file["task"]: file for file in files}
        named = {
            task: NamedFile(**{name: file[name] for name in NamedFile.__slots__})
            for task, file in by_task.items()
        }
        *_, last = by_task.values()  # of a slice, label files have its rows
        of_shard = {name: last[name] for name in ("sid", "path", "start_row", "rows")}
        labels = {task: named[task] for task in tasks}
        yield NamedShard(**of_shard, documents=named[None], labels=labels, sliced=sliced)
