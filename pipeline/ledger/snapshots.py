"""Snapshots: numbered, consistent views of finished work. The highest number is current.

Entry points: `publish` writes a snapshot, and `contents` reads one.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby, islice, zip_longest
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import StorageError, UnavailableError
from pipeline.hashes import canonical_json, parse_json, parse_sealed_json, sealed_json, short_hash
from pipeline.ledger.cells import Committed, is_whole
from pipeline.ledger.columns import ANSWER_COLUMNS
from pipeline.ledger.failed_rows import (
    NO_COUNTS,
    Counts,
    FileCounts,
    check_unchanged,
    complete_counts,
)
from pipeline.ledger.keys import documents_key, manifest_key, snapshot_key
from pipeline.ledger.numbered import free_numbers, numbers
from pipeline.sources.shards import Shard, Slice, fields_of
from pipeline.stores.store import Store

# The table of a snapshot's files has row groups of this many shards.
GROUP_SHARDS = 10_000

_OF_SHARD = ("path", "start_row", "end_row")
# A row of the table is a file; the task of a documents file is null, and so are its counts.
_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("sid", "task", "key", "etag", "hash")),
        *((name, pa.int64()) for name in ("rows", "failed", "skipped", "taken_over")),
        *zip(_OF_SHARD, (pa.string(), pa.int64(), pa.int64()), strict=True),
    ]
)


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
    hash: str | None = field(default=None, compare=False)  # None before it is published


@dataclass(frozen=True, slots=True)
class NamedShard:
    """A shard as a snapshot names it, with its files."""

    sid: str
    path: str
    start_row: int
    end_row: int
    rows: int
    documents: NamedFile
    labels: Mapping[str, NamedFile]  # by task

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
    missing_rows: int = 0  # of a partial snapshot: documents of the input without answers
    missing_files: int = 0  # of a partial snapshot: input files whose rows are not counted
    created_at: str = field(default="", compare=False)  # ISO 8601; "" if it is not published
    slice: Slice | None = None  # the documents that were asked about; of the others, none
    asked: int = 0  # the number of these documents; without a slice, all

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
    slice: Slice | None = None,
    counts: Counts = NO_COUNTS,
) -> int:
    """The number of the snapshot of this work: a new one, unless the spec's last is the same.

    A partial snapshot leaves out incomplete shards and counts their rows. `missing_files` is the
    number of input files whose rows cannot be counted. A snapshot of a slice is never complete. A
    file is read if neither `counts` nor the last snapshot has its counts and its hash. StorageError
    if work is missing and the snapshot is not partial; also if a file is not as it was written, or
    as the spec's last snapshot published it: each such file is named, with what to do.
    """
    whole = [shard for shard in shards if is_whole(shard, tasks, done)]
    rows = sum(shard.rows for shard in whole)
    all_shards = len(whole) == len(shards) and not missing_files
    if not partial and not all_shards:
        raise StorageError(f"{store.url}: the work is not complete, so it has no snapshot")
    header: dict[str, Any] = {
        "complete": all_shards and slice is None,
        "missing_files": missing_files,
        "missing_rows": sum(shard.rows for shard in shards) - rows,
        "rows": rows,
        "spec": spec_name,
        "tasks": {name: task.to_json() for name, task in tasks.items()},
        # — without a slice there is no such key, so snapshots keep their form
        **({} if slice is None else {"slice": slice.to_json()}),
    }
    known = counts
    for number in free_numbers(store, snapshot_key):
        last = last_published(store, spec_name, skip_damaged=True)
        shown = _shards(whole, tasks, done)
        if last is not None and _shows(store, last, header, shown):
            number = int(last["number"])
            break
        keys = (file.key for shard in _shards(whole, tasks, done) for file in shard.files)
        known = complete_counts(store, keys, {**published_counts(store, last, done), **known})
        if last is not None:
            check_unchanged(store, int(last["number"]), files_of(store, last), known, done)
        content = header | {"created_at": created_at, "number": number}
        if slice is not None:  # — the documents that were asked about
            files = (shard.labels.values() for shard in _shards(whole, tasks, done))
            skipped = sum(min(known[file.key].skipped for file in labels) for labels in files)
            content["asked"] = rows - skipped
        shown = _shards(whole, tasks, done)
        if _create(store, content, shown, known):
            break
    return number


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
        return Contents(
            number=int(content["number"]),
            spec=str(content["spec"]),
            tasks=tasks,
            shards=tuple(_read_shards(store, content)),
            # — of a slice, it shows no answers of the documents that were not asked about
            missing_rows=content["missing_rows"] + content["rows"] - asked_of(content),
            asked=asked_of(content),
            missing_files=int(content.get("missing_files", 0)),
            slice=Slice(**content["slice"]) if "slice" in content else None,
            created_at=str(content.get("created_at", "")),
        )


def asked_of(snapshot: Mapping[str, Any]) -> int:
    """The number of documents of a snapshot that were asked about, from its JSON."""
    return int(snapshot.get("asked", snapshot["rows"]))


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
) -> Contents:
    """The snapshot that this complete work would have; its number is 0, which no snapshot has."""
    rows = sum(shard.rows for shard in shards)
    return Contents(0, spec_name, tasks, tuple(_shards(shards, tasks, done)), asked=rows)


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
        data = store.read(snapshot_key(number))
        with suppress(StorageError) if skip_damaged else nullcontext():
            if (snapshot := _parsed(store, number, data)).get("spec") == spec_name:
                return snapshot
    return None


def read_snapshot(store: Store, number: int) -> dict[str, Any]:
    """One snapshot's header; its files are in a table."""
    return _parsed(store, number, store.read(snapshot_key(number)))


def snapshot_numbers(store: Store) -> list[int]:
    """The numbers of all snapshots, the current one first."""
    return numbers(store, snapshot_key)[::-1]


def published_sids(store: Store, spec_name: str) -> frozenset[str] | None:
    """The shards of the spec's last snapshot, or of the current one; None without a snapshot."""
    numbers = snapshot_numbers(store)
    last = last_published(store, spec_name, skip_damaged=True)
    for number in () if last is not None else numbers:
        with suppress(StorageError):  # a later one that is damaged says nothing
            last = read_snapshot(store, number)
            break
    return None if last is None else frozenset(file["sid"] for file in files_of(store, last))


def published_counts(
    store: Store, snapshot: Mapping[str, Any] | None, done: Committed
) -> dict[str, FileCounts]:
    """The counts in a snapshot of the current files that have the published etags."""
    counts: dict[str, FileCounts] = {}
    for file in () if snapshot is None else files_of(store, snapshot):
        sid, task = file["sid"], file["task"]
        etag = done.documents.get(sid) if task is None else done.labels.get(task, {}).get(sid)
        if etag == file["etag"]:
            failed, taken_over = file.get("failed") or 0, file.get("taken_over") or 0
            skipped = file.get("skipped") or 0
            counts[file["key"]] = FileCounts(failed, taken_over, file["hash"], skipped=skipped)
    return counts


def _shards(shards: Sequence[Shard], tasks: Iterable[str], done: Committed) -> Iterator[NamedShard]:
    """The shards with their current files."""
    for shard in shards:
        sid, piece, rows = shard.id, shard.piece, shard.rows
        documents = NamedFile(documents_key(sid), done.documents[sid], rows, sid, None)
        labels = {
            task: NamedFile(done.label_key(task, sid), done.labels[task][sid], rows, sid, task)
            for task in tasks
        }
        yield NamedShard(sid, shard.path, piece.start_row, piece.end_row, rows, documents, labels)


def _read_shards(store: Store, snapshot: Mapping[str, Any]) -> Iterator[NamedShard]:
    """The shards of a snapshot, whose files follow one another."""
    for sid, files in groupby(files_of(store, snapshot), itemgetter("sid")):
        named = {}
        for file in files:
            named[file["task"]] = NamedFile(**{name: file[name] for name in NamedFile.__slots__})
        shown = {name: file[name] for name in ("rows", *_OF_SHARD)}
        labels = {task: named[task] for task in snapshot["tasks"]}
        yield NamedShard(sid=sid, **shown, documents=named[None], labels=labels)


def files_of(store: Store, snapshot: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The files that a snapshot names, each as a row of its table."""
    with _parsing(store, snapshot.get("number", 0)):
        try:
            data = store.read(snapshot["files"])
        except UnavailableError:
            raise
        except StorageError as error:
            raise ValueError(f"the table of its files is not there: {error}") from error
        if short_hash(data) != snapshot["files_hash"]:
            raise ValueError(f"{snapshot['files']} does not match its hash")
        table = pq.ParquetFile(pa.BufferReader(data))
        for group in range(table.num_row_groups):
            yield from table.read_row_group(group, use_threads=False).to_pylist()


def _parsed(store: Store, number: int, data: bytes) -> dict[str, Any]:
    with _parsing(store, number):
        if (snapshot := parse_sealed_json(data))["number"] != number:
            raise ValueError(f"it is snapshot {snapshot['number']}, under another key")
        return snapshot


@contextmanager
def _parsing(store: Store, number: int) -> Iterator[None]:
    """A snapshot without what it must have is a StorageError."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise StorageError(
            f"{store.url}/{snapshot_key(number)}: is not a snapshot: {error!r}; "
            f"restore it from a copy, or delete it: `assay run` publishes the work that is there"
        ) from error


def _shows(
    store: Store,
    snapshot: Mapping[str, Any],
    header: Mapping[str, Any],
    shards: Iterator[NamedShard],
) -> bool:
    """Whether the snapshot shows the same work; its number, time and counts may differ."""
    expected = {"slice": None} | parse_json(canonical_json(header))
    return all(snapshot.get(name) == value for name, value in expected.items()) and all(
        was == now for was, now in zip_longest(_read_shards(store, snapshot), shards)
    )


def _create(
    store: Store,
    content: dict[str, Any],
    shards: Iterator[NamedShard],
    counts: Counts,
) -> bool:
    """Creates the table of files, then the header; False if the number is taken."""

    def rows_of(shard: NamedShard) -> Iterator[dict[str, Any]]:
        for file in shard.files:
            of_file = counts[file.key]
            counted = {name: getattr(of_file, name) for name in ("failed", "skipped", "taken_over")}
            yield fields_of(file) | {"hash": of_file.hash} | (counted if file.task else {})

    def place_of(shard: NamedShard) -> dict[str, Any]:
        return {name: getattr(shard, name) for name in _OF_SHARD}

    number = content["number"]
    # — a row group at a time: all of them as tables would fill the memory
    buffer, repeated = io.BytesIO(), ["sid", "task", "path"]
    with pq.ParquetWriter(buffer, _SCHEMA, compression="zstd", use_dictionary=repeated) as writer:
        while group := list(islice(shards, GROUP_SHARDS)):
            rows = [file | place_of(shard) for shard in group for file in rows_of(shard)]
            writer.write_table(pa.Table.from_pylist(rows, _SCHEMA), row_group_size=len(rows))
    data = buffer.getvalue()
    content |= {"files": manifest_key(number), "files_hash": short_hash(data)}
    if not store.create(content["files"], data):
        return False
    return store.create(snapshot_key(number), sealed_json(content))
