"""A snapshot, parsed: its tasks, its shards and their files. Entry point: `contents`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import StorageError
from pipeline.ledger.cells import Committed, File
from pipeline.ledger.columns import ANSWER_COLUMNS
from pipeline.ledger.keys import listing_prefix, snapshot_key
from pipeline.ledger.snapshots import (
    SnapshotTask,
    current_snapshot,
    last_snapshot,
    read_snapshot,
)
from pipeline.sources.shards import Shard
from pipeline.stores.store import Store

UNPUBLISHED = 0  # no snapshot has this number


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

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def files(self) -> Iterator[NamedFile]:
        """All files, shard by shard."""
        return (file for shard in self.shards for file in shard.files)


def contents(store: Store, number: int | None = None) -> Contents:
    """Snapshot `number`, or the current one; StorageError if there is none or it is invalid."""
    content = current_snapshot(store) if number is None else read_snapshot(store, number)
    if content is None:
        raise StorageError(
            f"{store.url}: has no snapshot yet; `assay run` publishes one when its work is complete"
        )
    try:
        return _parsed(content)
    except (KeyError, TypeError, ValueError) as error:
        place = snapshot_key(number) if number is not None else "snapshots/, the highest number"
        raise StorageError(
            f"{store.url}/{place}: is not a snapshot: {error!r}; restore it, or delete it and "
            f"publish it again with `assay run`"
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
    spec_name: str, tasks: Mapping[str, SnapshotTask], shards: Sequence[Shard], done: Committed
) -> Contents:
    """The snapshot that this work would have; its number is 0."""
    return Contents(UNPUBLISHED, spec_name, tasks, tuple(_named(s, tasks, done) for s in shards))


def etags_now(store: Store, files: Iterable[NamedFile]) -> dict[str, str]:
    """The etags by key of all objects in the folders of these files: one LIST for each folder."""
    folders = {listing_prefix(file.key) for file in files}
    return {s.key: s.etag for folder in sorted(folders) for s in store.list(folder)}


def change_of(file: NamedFile, etags: Mapping[str, str]) -> str | None:
    """How the file differs from the published one, or None; `etags` is of `etags_now`."""
    etag = etags.get(file.key)
    if etag is None:
        return "does not exist"
    if etag != file.etag:
        return f"has the etag {etag} and was published with {file.etag}: it is another file"
    return None


def _named(shard: Shard, tasks: Iterable[str], done: Committed) -> NamedShard:
    def named(file: File, task: str | None) -> NamedFile:
        return NamedFile(file.key, file.etag, shard.rows, shard.id, task)

    return NamedShard(
        sid=shard.id,
        path=shard.path,
        start_row=shard.piece.start_row,
        rows=shard.rows,
        documents=named(done.documents_file(shard.id), None),
        labels={task: named(done.label_file(task, shard.id), task) for task in tasks},
    )


def _parsed(content: Mapping[str, Any]) -> Contents:
    files: dict[str, list[NamedFile]] = {}
    for entry in content["files"]:
        file = NamedFile(**{name: entry[name] for name in NamedFile.__dataclass_fields__})
        files.setdefault(file.sid, []).append(file)
    tasks = {
        name: SnapshotTask(
            task["fp"], tuple(task["labels"]), tuple(task.get("columns", ANSWER_COLUMNS))
        )
        for name, task in content["tasks"].items()
    }
    shards = tuple(_shard(entry, files[entry["sid"]], tasks) for entry in content["shards"])
    missing = (int(content.get(name, 0)) for name in ("missing_rows", "missing_files"))
    return Contents(int(content["number"]), str(content["spec"]), tasks, shards, *missing)


def _shard(entry: Mapping[str, Any], files: list[NamedFile], tasks: Iterable[str]) -> NamedShard:
    by_task = {file.task: file for file in files}
    return NamedShard(
        sid=entry["sid"],
        path=entry["path"],
        start_row=entry["start_row"],
        rows=entry["rows"],
        documents=by_task[None],
        labels={task: by_task[task] for task in tasks},
    )
