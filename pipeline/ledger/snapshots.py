"""Snapshots: numbered, consistent views of finished work. The highest number is current.

Entry points: `publish`, `current_snapshot` and `read_snapshot`; `ledger.contents` parses them.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.errors import StorageError
from pipeline.hashes import canonical_json
from pipeline.ledger.cells import Committed, File, is_whole
from pipeline.ledger.columns import ANSWER_COLUMNS
from pipeline.ledger.keys import SNAPSHOTS, parse_key, snapshot_key
from pipeline.sources.shards import Shard
from pipeline.stores.store import Store

# A lost race means that another run published; this many in a row have another cause.
MAX_LOST_RACES = 100


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


def complete(shards: Sequence[Shard], tasks: Collection[str], done: Committed) -> bool:
    """Whether every shard has its documents file and the labels of all tasks."""
    return all(is_whole(shard.id, tasks, done) for shard in shards)


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
) -> int:
    """The number of the snapshot of this work: a new one, unless the spec's last is the same.

    A partial snapshot leaves out incomplete shards and counts their rows. `missing_files` is the
    number of input files whose rows cannot be counted. StorageError if work is missing and the
    snapshot is not partial.
    """
    if not partial and (missing_files or not complete(shards, tasks, done)):
        raise StorageError(f"{store.url}: the work is not complete, so it has no snapshot")
    view = _view(spec_name, tasks, shards, done, missing_files)
    stamp = canonical_json(created_at)
    for _ in range(MAX_LOST_RACES):
        numbers = snapshot_numbers(store)
        last = _last_of(store, numbers, spec_name)
        if last is not None and _shows(*last, view):
            return last[1]
        following = numbers[0] + 1 if numbers else 1
        if store.create(snapshot_key(following), _whole(_written(view, following, stamp))):
            return following
    raise StorageError(f"{store.url}/{SNAPSHOTS}: {MAX_LOST_RACES} numbers in a row were taken")


def current_snapshot(store: Store) -> dict[str, Any] | None:
    """The snapshot with the highest number, or None."""
    numbers = snapshot_numbers(store)
    return read_snapshot(store, numbers[0]) if numbers else None


def last_snapshot(store: Store, spec_name: str) -> int | None:
    """The number of the spec's last snapshot, or None."""
    last = _last_of(store, snapshot_numbers(store), spec_name)
    return None if last is None else last[1]


def read_snapshot(store: Store, number: int) -> dict[str, Any]:
    """One snapshot's content."""
    key = snapshot_key(number)
    try:
        snapshot: dict[str, Any] = json.loads(store.read(key))
    except ValueError as error:
        raise StorageError(f"{store.url}/{key}: is not JSON: {error}") from error
    return snapshot


def snapshot_numbers(store: Store) -> list[int]:
    """The numbers of all snapshots, the current one first."""
    keys = (parse_key(stored.key) for stored in store.list(SNAPSHOTS))
    return sorted((key.number for key in keys if key), reverse=True)


def _last_of(store: Store, numbers: Sequence[int], spec_name: str) -> tuple[bytes, int] | None:
    """The spec's last snapshot and its number; later ones may be of other specs."""
    named = b'"spec":%b,"tasks":' % canonical_json(spec_name)
    for number in numbers:
        snapshot = store.read(snapshot_key(number))
        if named in snapshot:
            return snapshot, number
    return None


@dataclass(frozen=True, slots=True)
class _View:
    """The content of a snapshot without its number and time."""

    spec_name: str
    tasks: Mapping[str, SnapshotTask]
    shards: Sequence[Shard]
    missing_rows: int  # rows of the shards that are left out
    missing_files: int
    complete: bool
    done: Committed


def _view(
    spec_name: str,
    tasks: Mapping[str, SnapshotTask],
    shards: Sequence[Shard],
    done: Committed,
    missing_files: int,
) -> _View:
    whole = [shard for shard in shards if is_whole(shard.id, tasks, done)]
    missing_rows = sum(shard.rows for shard in shards) - sum(shard.rows for shard in whole)
    is_complete = len(whole) == len(shards) and not missing_files
    return _View(spec_name, tasks, whole, missing_rows, missing_files, is_complete, done)


def _written(view: _View, number: int, created_at: bytes) -> Iterator[bytes]:
    """The snapshot's canonical JSON, one shard at a time: as one value it would fill the memory."""
    tasks, done = view.tasks, view.done
    yield b'{"complete":%b,"created_at":%b,"files":[' % (canonical_json(view.complete), created_at)
    yield from _joined(canonical_json(_file_entries(s, tasks, done))[1:-1] for s in view.shards)
    rows = sum(shard.rows for shard in view.shards)
    counts = {
        "missing_files": view.missing_files,
        "missing_rows": view.missing_rows,
        "number": number,
        "rows": rows,
    }
    yield b'],%b,"shards":[' % canonical_json(counts)[1:-1]
    yield from _joined(canonical_json(_shard_entry(shard)) for shard in view.shards)
    named = {name: task.to_json() for name, task in tasks.items()}
    yield b"],%b" % canonical_json({"spec": view.spec_name, "tasks": named})[1:]


def _joined(written: Iterable[bytes]) -> Iterator[bytes]:
    """The parts with commas between them."""
    comma = b""
    for each in written:
        yield comma + each
        comma = b","


def _whole(chunks: Iterable[bytes]) -> bytes:
    # — a join would hold the chunks and the result; a buffer holds the bytes once
    buffer = io.BytesIO()
    buffer.writelines(chunks)
    return buffer.getvalue()


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


def _shard_entry(shard: Shard) -> dict[str, object]:
    return {
        "sid": shard.id,
        "path": shard.path,
        "start_row": shard.piece.start_row,
        "end_row": shard.piece.end_row,
        "rows": shard.rows,
    }


def _file_entries(shard: Shard, tasks: Collection[str], done: Committed) -> list[dict[str, object]]:
    """The shard's documents file (its task is null), then its label files."""
    sid = shard.id
    entries = [_file_entry(done.documents_file(sid), shard, None)]
    return entries + [_file_entry(done.label_file(task, sid), shard, task) for task in tasks]


def _file_entry(file: File, shard: Shard, task: str | None) -> dict[str, object]:
    return {
        "key": file.key,
        "rows": shard.rows,
        "etag": file.etag,
        "task": task,
        "sid": shard.id,
    }
