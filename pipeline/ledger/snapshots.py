"""Snapshots: numbered, consistent views of finished work. The highest number is current.

Entry points: `publish` writes a snapshot, and `contents` reads one.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from base64 import b64encode
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.errors import StorageError
from pipeline.hashes import canonical_json, parse_json
from pipeline.ledger.cells import Committed, File, is_whole
from pipeline.ledger.columns import ANSWER_COLUMNS
from pipeline.ledger.keys import SNAPSHOTS, is_part, listing_prefix, parse_key, snapshot_key
from pipeline.sources.shards import Shard, Slice, fields_of
from pipeline.stores.local import ETAG as LOCAL_ETAG
from pipeline.stores.store import Store, StoredObject

# A lost race means that another run published; this many in a row have another cause.
MAX_LOST_RACES = 100
MISSING = "does not exist"  # a file that a snapshot names


@dataclass(frozen=True, slots=True)
class SnapshotTask:
    """A task in a snapshot: its version, its labels in order, and its files' columns."""

    fp: str
    labels: tuple[str, ...]
    columns: tuple[str, ...] = ANSWER_COLUMNS

    def to_json(self) -> dict[str, object]:
        """The JSON form. Default columns are left out, so older snapshots keep their form."""
        entry = asdict(self)
        return {k: v for k, v in entry.items() if k != "columns" or v != ANSWER_COLUMNS}


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
) -> int:
    """The number of the snapshot of this work: a new one, unless the spec's last is the same.

    A partial snapshot leaves out incomplete shards and counts their rows. `missing_files` is the
    number of input files whose rows cannot be counted. Sliced shards have the rows of `slice_rows`,
    by shard id; their snapshot is never complete. StorageError if work is missing and the snapshot
    is not partial.
    """
    whole = [shard for shard in shards if is_whole(shard, tasks, done)]
    rows = [shard.rows if slice_rows is None else slice_rows[shard.id] for shard in whole]
    missing_rows = sum(shard.rows for shard in shards) - sum(rows)
    all_shards = len(whole) == len(shards) and not missing_files
    if not partial and not all_shards:
        raise StorageError(f"{store.url}: the work is not complete, so it has no snapshot")
    part = shards[0].slice if shards else None
    complete = all_shards and part is None
    named = tuple(zip(whole, rows, strict=True))
    view = _View(spec_name, tasks, named, part, missing_rows, missing_files, complete, done)
    stamp = canonical_json(created_at)
    for _ in range(MAX_LOST_RACES):
        numbers = snapshot_numbers(store)
        last = _last_of(store, numbers, spec_name)
        if last is not None and _shows(*last, view):
            return last[1]
        following = numbers[0] + 1 if numbers else 1
        # — a join would hold the chunks and the result; a buffer holds the bytes once
        buffer = io.BytesIO()
        buffer.writelines(_written(view, following, stamp))
        if store.create(snapshot_key(following), buffer.getvalue()):
            return following
    raise StorageError(f"{store.url}/{SNAPSHOTS}: {MAX_LOST_RACES} numbers in a row were taken")


def contents(store: Store, number: int | None = None) -> Contents:
    """Snapshot `number`, or the current one; StorageError if there is none or it is invalid."""
    numbers = snapshot_numbers(store) if number is None else [number]
    if not numbers:
        raise StorageError(
            f"{store.url}: has no snapshot yet; `assay run` publishes one when its work is complete"
        )
    try:
        return _parsed(read_snapshot(store, numbers[0]))
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"{store.url}/{snapshot_key(numbers[0])}: is not a snapshot: {error!r}; "
            f"restore it, or delete it and publish it again with `assay run`"
        ) from error


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
    rows = {shard.id: shard.rows for shard in shards} if slice_rows is None else slice_rows
    named = tuple(_named(shard, rows[shard.id], tasks, done) for shard in shards)
    return Contents(0, spec_name, tasks, named)


def changed_files(store: Store, files: Collection[NamedFile]) -> dict[str, str]:
    """By key, how each file that is not the published one differs: one LIST for each folder.

    A file with another etag may be a copy, made with other tools or in another store. It is the
    same file if its MD5 hash is the published etag, as object stores give it. A local etag has the
    size and the time: if no file has its etag, all were copied, and their sizes are compared.
    """
    folders = {listing_prefix(file.key) for file in files}
    now = {each.key: each for folder in sorted(folders) for each in store.list(folder)}
    other = [file for file in files if file.key not in now or now[file.key].etag != file.etag]
    all_copied = len(other) == len(files)
    changes = {}
    for file in other:
        if file.key not in now:
            changes[file.key] = MISSING
        elif not _is_copy(store, file, now[file.key], all_copied=all_copied):
            etag = now[file.key].etag
            what = f"has the etag {etag} and was published with {file.etag}: it is another file"
            changes[file.key] = what
    return changes


def _is_copy(store: Store, file: NamedFile, now: StoredObject, *, all_copied: bool) -> bool:
    if size := LOCAL_ETAG.fullmatch(file.etag):
        return all_copied and int(size[1], 16) == now.size_bytes
    md5 = hashlib.md5(store.read(file.key), usedforsecurity=False)
    return file.etag in (md5.hexdigest(), b64encode(md5.digest()).decode())


def last_snapshot(store: Store, spec_name: str) -> int | None:
    """The number of the spec's last snapshot, or None; StorageError if a later one is cut off."""
    for number in snapshot_numbers(store):
        snapshot = store.read(snapshot_key(number))
        if _is_of(spec_name, snapshot):
            return number
        if b'"spec":"' not in snapshot or not snapshot.endswith(b"}"):
            raise StorageError(
                f"{store.url}/{snapshot_key(number)}: is cut off, so its spec is not known; "
                f"restore it, or delete it and publish it again with `assay run`"
            )
    return None


def read_snapshot(store: Store, number: int) -> dict[str, Any]:
    """One snapshot's content."""
    key = snapshot_key(number)
    try:
        snapshot: dict[str, Any] = parse_json(store.read(key))
    except ValueError as error:
        raise StorageError(f"{store.url}/{key}: is not JSON: {error}") from error
    return snapshot


def slice_of(store: Store, number: int) -> Slice | None:
    """The slice that one snapshot is limited to."""
    # — a snapshot may be large, and no string in JSON has these bytes
    _, mark, rest = store.read(snapshot_key(number)).partition(b'],"slice":')
    return Slice(**json.JSONDecoder().raw_decode(rest.decode())[0]) if mark else None


def snapshot_numbers(store: Store) -> list[int]:
    """The numbers of all snapshots, the current one first."""
    keys = (parse_key(stored.key) for stored in store.list(SNAPSHOTS))
    return sorted((key.number for key in keys if key), reverse=True)


def _last_of(store: Store, numbers: Sequence[int], spec_name: str) -> tuple[bytes, int] | None:
    """The spec's last snapshot and its number; later ones may be of other specs, or cut off."""
    for number in numbers:
        snapshot = store.read(snapshot_key(number))
        if _is_of(spec_name, snapshot):
            return snapshot, number
    return None


def _is_of(spec_name: str, snapshot: bytes) -> bool:
    return b'"spec":%b,"tasks":' % canonical_json(spec_name) in snapshot


@dataclass(frozen=True, slots=True)
class _View:
    """The content of a snapshot without its number and time."""

    spec_name: str
    tasks: Mapping[str, SnapshotTask]
    shards: Sequence[tuple[Shard, int]]  # with the rows of its files
    slice: Slice | None
    missing_rows: int  # rows of the input that are left out
    missing_files: int
    complete: bool
    done: Committed


def _written(view: _View, number: int, created_at: bytes) -> Iterator[bytes]:
    """The snapshot's canonical JSON, one shard at a time: as one value it would fill the memory."""
    yield b'{"complete":%b,"created_at":%b,"files":[' % (canonical_json(view.complete), created_at)
    named = (_named(shard, rows, view.tasks, view.done) for shard, rows in view.shards)
    yield from _joined(canonical_json(list(map(fields_of, s.files)))[1:-1] for s in named)
    rows = sum(rows for _, rows in view.shards)
    counts = {
        "missing_files": view.missing_files,
        "missing_rows": view.missing_rows,
        "number": number,
        "rows": rows,
    }
    yield b'],%b,"shards":[' % canonical_json(counts)[1:-1]
    yield from _joined(canonical_json(_shard_entry(*each)) for each in view.shards)
    tasks = {name: task.to_json() for name, task in view.tasks.items()}
    # — without a slice there is no such key, so snapshots keep their form
    part = {} if view.slice is None else {"slice": view.slice.to_json()}
    yield b"],%b" % canonical_json({**part, "spec": view.spec_name, "tasks": tasks})[1:]


def _joined(written: Iterable[bytes]) -> Iterator[bytes]:
    """The parts with commas between them."""
    comma = b""
    for each in written:
        yield comma + each
        comma = b","


def _shows(snapshot: bytes, number: int, view: _View) -> bool:
    """Whether the snapshot shows this view; its time may differ."""
    stamped = re.match(rb'\{"complete":\w+,"created_at":("(?:[^"\\]|\\.)*"),', snapshot)
    if stamped is None:  # written by an older version, or invalid
        return False
    at = 0
    for chunk in _written(view, number, stamped[1]):
        if not snapshot.startswith(chunk, at):
            return False
        at += len(chunk)
    return at == len(snapshot)


def _shard_entry(shard: Shard, rows: int) -> dict[str, object]:
    return {
        "sid": shard.id,
        "path": shard.path,
        "start_row": shard.piece.start_row,
        "end_row": shard.piece.end_row,
        "rows": rows,
    }


def _named(shard: Shard, rows: int, tasks: Iterable[str], done: Committed) -> NamedShard:
    files: list[tuple[str | None, File]] = [(None, done.documents_file(shard.id))]
    files += [(task, done.label_file(task, shard.cell)) for task in tasks]
    named = [
        NamedFile(f.key, f.etag, shard.rows if task is None else rows, shard.id, task)
        for task, f in files
    ]
    return _shard(_shard_entry(shard, rows), named, tasks, sliced=shard.slice is not None)


def _parsed(content: Mapping[str, Any]) -> Contents:
    files: dict[str, list[NamedFile]] = {}
    for entry in content["files"]:
        file = NamedFile(**{name: entry[name] for name in NamedFile.__slots__})
        files.setdefault(file.sid, []).append(file)
    tasks = {
        name: SnapshotTask(
            task["fp"], tuple(task["labels"]), tuple(task.get("columns", ANSWER_COLUMNS))
        )
        for name, task in content["tasks"].items()
    }
    part = Slice(**content["slice"]) if "slice" in content else None
    shards = tuple(
        _shard(entry, files[entry["sid"]], tasks, sliced=part is not None)
        for entry in content["shards"]
    )
    return Contents(
        number=int(content["number"]),
        spec=str(content["spec"]),
        tasks=tasks,
        shards=shards,
        missing_rows=int(content.get("missing_rows", 0)),
        missing_files=int(content.get("missing_files", 0)),
        slice=part,
        created_at=str(content.get("created_at", "")),
    )


def _shard(
    entry: Mapping[str, Any], files: list[NamedFile], tasks: Iterable[str], *, sliced: bool
) -> NamedShard:
    by_task = {file.task: file for file in files}
    return NamedShard(
        sid=entry["sid"],
        path=entry["path"],
        start_row=entry["start_row"],
        rows=entry["rows"],
        documents=by_task[None],
        labels={task: by_task[task] for task in tasks},
        sliced=sliced,
    )
