"""Snapshots: a consistent view of finished work, numbered, the highest current.

Knows which files belong together. Knows nothing of what the files hold or how they are made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.data.hashes import canonical_json
from pipeline.data.ledger import Committed, File, remaining
from pipeline.data.shards import Shard
from pipeline.data.storage import Store
from pipeline.errors import StorageError

FOLDER = "snapshots/"
# Each lost race is another run's snapshot; so many in a row mean that something else is wrong.
MAX_LOST_RACES = 100


@dataclass(frozen=True, slots=True)
class SnapshotTask:
    """Which version of a task a snapshot holds, and its labels in order."""

    fp: str
    labels: tuple[str, ...]


def complete(shards: Sequence[Shard], tasks: Collection[str], done: Committed) -> bool:
    """Whether every shard has its documents file and every task's labels."""
    return not remaining(shards, tasks, done, {})


def publish(
    store: Store,
    spec_name: str,
    tasks: Mapping[str, SnapshotTask],
    shards: Sequence[Shard],
    done: Committed,
    *,
    created_at: str,
) -> int:
    """The number of the snapshot that shows this work: a new one, or the current if it does."""
    if not complete(shards, tasks, done):
        raise StorageError(f"{store.url}: the work is not complete, so there is no snapshot of it")
    content = _content(spec_name, tasks, shards, done)
    for _ in range(MAX_LOST_RACES):
        current = current_snapshot(store)
        if current is not None and _unstamped(current) == content:
            return int(current["number"])
        number = int(current["number"]) + 1 if current else 1
        stamped = {"number": number, "created_at": created_at, **content}
        if store.create(snapshot_key(number), canonical_json(stamped)):
            return number
    raise StorageError(f"{store.url}/{FOLDER}: {MAX_LOST_RACES} numbers in a row were taken")


def current_snapshot(store: Store) -> dict[str, Any] | None:
    """The snapshot with the highest number, or None."""
    numbers = [_number(stored.key) for stored in store.list(FOLDER)]
    highest = max((number for number in numbers if number is not None), default=None)
    return None if highest is None else read_snapshot(store, highest)


def read_snapshot(store: Store, number: int) -> dict[str, Any]:
    """One snapshot's content."""
    key = snapshot_key(number)
    try:
        snapshot: dict[str, Any] = json.loads(store.read(key))
    except ValueError as error:
        raise StorageError(f"{store.url}/{key}: is not JSON: {error}") from error
    return snapshot


def snapshot_key(number: int) -> str:
    """Where a snapshot is."""
    return f"{FOLDER}{number:08d}.json"


def _number(key: str) -> int | None:
    matched = re.fullmatch(rf"{FOLDER}(\d{{8,}})\.json", key)
    return int(matched[1]) if matched else None


def _content(
    spec_name: str,
    tasks: Mapping[str, SnapshotTask],
    shards: Sequence[Shard],
    done: Committed,
) -> dict[str, Any]:
    """What two snapshots of the same work have in common, as JSON values."""
    content = {
        "spec": spec_name,
        "tasks": {name: asdict(task) for name, task in tasks.items()},
        "rows": sum(shard.rows for shard in shards),
        "shards": [_shard_entry(shard) for shard in shards],
        "files": [entry for shard in shards for entry in _file_entries(shard, tasks, done)],
    }
    return dict(json.loads(canonical_json(content)))


def _unstamped(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in snapshot.items() if key not in ("number", "created_at")}


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
