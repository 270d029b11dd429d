"""What an output has and what it lacks. Entry points: `committed` and `remaining`.

A cell is the answers to one task about all rows of a shard, or about some of them: one file, and
its retries. It is done if the file exists.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property

from pipeline.errors import StorageError
from pipeline.hashes import parse_json
from pipeline.ledger.keys import (
    DOCUMENTS,
    SPECS,
    documents_key,
    label_folders,
    label_key,
    parse_key,
    spec_key,
)
from pipeline.sources.shards import Shard
from pipeline.spec.fingerprint import Fingerprint
from pipeline.stores.store import Store, StoredObject

# A Parquet file has at least two magic numbers and the length of its footer.
LEAST_FILE_BYTES = 12

# A LIST reply has 1,000 keys and takes about 0.1 s, so the labels of 200,000 shards take 200
# replies. More concurrent LISTs would hold too much in memory.
CONCURRENT_LISTS = 8


@dataclass(frozen=True, slots=True)
class File:
    """A file of results, as a snapshot names it."""

    key: str
    etag: str


@dataclass(frozen=True)
class Committed:
    """The files that a LIST shows: documents files by shard id, label files by cell.

    Only etags are kept, because a job of 200,000 shards has millions of keys: each key follows
    from its cell and task.
    """

    fp: Mapping[str, str]  # by task
    documents: Mapping[str, str]  # etags
    labels: Mapping[str, Mapping[str, str]]  # etags; by task first
    retries: Mapping[str, Mapping[str, tuple[int, str]]]  # the highest number and its etag

    @cached_property
    def parts(self) -> Mapping[str, Mapping[str, Sequence[str]]]:
        """By task and shard id, the cells that have some rows of the shard."""
        parts: dict[str, dict[str, list[str]]] = {task: {} for task in self.labels}
        for task, labels in self.labels.items():
            for cell in labels:
                sid, _, part = cell.partition(".")
                if part:
                    parts[task].setdefault(sid, []).append(cell)
        return parts

    def documents_file(self, sid: str) -> File:
        return File(documents_key(sid), self.documents[sid])

    def label_file(self, task: str, cell: str) -> File:
        """The file with the cell's current labels: its latest retry, else the first try."""
        number, etag = self.retries[task].get(cell) or (0, self.labels[task][cell])
        return File(label_key(task, self.fp[task], cell, number), etag)

    def cells(self, task: str, sid: str) -> list[str]:
        """The cells of a shard: that of all its rows first, then those of parts."""
        labels = self.labels.get(task, {})
        return [sid] * (sid in labels) + [*self.parts.get(task, {}).get(sid, ())]

    def retry(self, task: str, cell: str) -> int:
        """The number of the cell's latest retry; 0 without one."""
        return self.retries[task].get(cell, (0, ""))[0]


@dataclass(frozen=True, slots=True)
class Source:
    """A label file with answers that can be reused."""

    sid: str  # of the shard whose documents file has the texts
    key: str


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A shard and what to make for it: labels of these tasks, and perhaps the documents file."""

    shard: Shard
    tasks: tuple[str, ...]
    documents: bool
    sources: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)  # by `version_name`
    retry: int = 0  # the number of this retry of failed rows; 0: the labels are missing
    to_ask: int | None = None  # rows that no source answers for the model; None: not known yet

    @property
    def asked_rows(self) -> int:
        """The most rows that the model reads."""
        if not self.tasks:
            return 0
        return self.shard.rows if self.to_ask is None else self.to_ask

    @property
    def asks(self) -> bool:
        """Whether the item probably needs a model: not if its rows have answers already."""
        return self.asked_rows > 0


def version_name(task: str, fp: str) -> str:
    """The name of one version of a task: `<task>/<fp>`."""
    return f"{task}/{fp}"


def committed(
    store: Store,
    fp: Mapping[str, str],
    sids: Collection[str] | None,
    *,
    documents: Mapping[str, str] | None = None,
) -> Committed:
    """The existing files of these shards for these tasks; of all shards of the output for None.

    Makes two LISTs for each task, concurrently, and one of the documents unless they are passed.
    """
    known: _Known = str if sids is None else {sid: sid for sid in sids}.get
    with ThreadPoolExecutor(CONCURRENT_LISTS) as pool:
        labels = pool.map(lambda t: _list_files(store, label_folders(t, fp[t])[0], known), fp)
        retries = pool.map(lambda task: _list_retries(store, task, fp[task], known), fp)
        return Committed(
            fp=dict(fp),
            documents=_list_files(store, DOCUMENTS, known) if documents is None else documents,
            labels=dict(zip(fp, labels, strict=True)),
            retries=dict(zip(fp, retries, strict=True)),
        )


def is_whole(shard: Shard, tasks: Collection[str], done: Committed) -> bool:
    """Whether the shard has its documents file and the labels of all tasks."""
    cell = shard.cell
    return shard.id in done.documents and all(cell in done.labels[task] for task in tasks)


def remaining(shards: Sequence[Shard], tasks: Collection[str], done: Committed) -> list[WorkItem]:
    """The work items for everything that is missing, in the order of the shards."""
    items = []
    for shard in shards:
        if not is_whole(shard, tasks, done):
            absent = tuple(task for task in tasks if shard.cell not in done.labels[task])
            items.append(WorkItem(shard, absent, documents=shard.id not in done.documents))
    return items


def unfinished(work_items: Sequence[WorkItem], done: Committed) -> list[WorkItem]:
    """The retries among the items whose files do not exist yet."""
    left = []
    for item in work_items:
        tasks = tuple(t for t in item.tasks if done.retry(t, item.shard.cell) < item.retry)
        left += [replace(item, tasks=tasks)] * bool(tasks)
    return left


def record_specs(store: Store, fp: Mapping[str, str], contents: Mapping[str, bytes]) -> None:
    """Creates the file with each fingerprint's content; StorageError if one has other content."""
    for task, fingerprint in fp.items():
        key = spec_key(task, fingerprint)
        if not store.create(key, contents[task]) and store.read(key) != contents[task]:
            raise StorageError(
                f"{store.url}/{key}: its content was changed and no longer matches the "
                f"fingerprint; restore it, or delete it and run again"
            )


def stored_fps(store: Store, task: str) -> list[str]:
    """The fingerprints of the task whose content the output has."""
    keys = [(stored.key, parse_key(stored.key)) for stored in store.list(f"{SPECS}{task}/")]
    return [own.fp for key, own in keys if own and key == spec_key(task, own.fp)]


def stored_version(store: Store, task: str, fp: str) -> Fingerprint:
    """The content of a fingerprint, as the output has it; a damaged file counts as empty."""
    try:
        content = parse_json(store.read(spec_key(task, fp)))
    except ValueError:
        content = None
    return Fingerprint(content if isinstance(content, dict) else {})


# The same id as a string that is in memory already, or None if the shard's files do not count.
_Known = Callable[[str], str | None]


def _list_files(store: Store, prefix: str, known: _Known) -> dict[str, str]:
    """The etags of the files of shards, by cell; other files are not looked at."""
    listed = ((parse_key(stored.key), stored) for stored in store.list(prefix))
    return {
        (key.cell if key.part else sid): _etag_of(store, stored)
        for key, stored in listed
        if key and (sid := known(key.sid))
    }


def _etag_of(store: Store, stored: StoredObject) -> str:
    """The etag of a file of results; StorageError if it is too short to be one."""
    if stored.size_bytes < LEAST_FILE_BYTES:
        raise StorageError(
            f"{store.url}/{stored.key}: has {stored.size_bytes} bytes of its own, or is a link, so "
            f"it is not a file of results; restore it, or delete it and run again"
        )
    return stored.etag


def _list_retries(store: Store, task: str, fp: str, known: _Known) -> dict[str, tuple[int, str]]:
    """The highest number of each cell, with its etag."""
    latest: dict[str, tuple[int, str]] = {}
    for stored in store.list(label_folders(task, fp)[1]):
        key = parse_key(stored.key)
        if key and known(key.sid):
            retry = key.number, _etag_of(store, stored)
            latest[key.cell] = max(latest.get(key.cell, retry), retry)
    return latest
