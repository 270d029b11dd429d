"""What an output has and what it lacks. Entry points: `committed` and `remaining`.

A cell is the answers to one version of a task about all rows of a shard. It has a file in
`labels/`, and one in `retries/` for each time that its failed rows were tried again; the current
answers are those of the file with the highest number. A cell is done if it has a file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pipeline.errors import StorageError
from pipeline.hashes import parse_json
from pipeline.ledger.keys import DOCUMENTS, SPECS, label_folders, label_key, parse_key, spec_key
from pipeline.sources.shards import Shard
from pipeline.spec.fingerprint import Fingerprint
from pipeline.stores.store import Store

# A LIST reply has 1,000 keys and takes about 0.1 s, so the labels of 200,000 shards take 200
# replies. More concurrent LISTs would hold too much in memory.
CONCURRENT_LISTS = 8

Interned = Callable[[str], str | None]


@dataclass(frozen=True)
class Committed:
    """The files that a LIST shows: documents files and current label files, by shard id.

    Only etags are kept, because a job of 200,000 shards has millions of keys: each key follows
    from its shard and task.
    """

    fp: Mapping[str, str]  # by task
    documents: Mapping[str, str]  # etags
    labels: Mapping[str, Mapping[str, str]]  # etags of the current files; by task first
    retries: Mapping[str, Mapping[str, int]]  # the numbers of these files, if they are retries

    def label_key(self, task: str, sid: str) -> str:
        """The key of the shard's current label file."""
        return label_key(task, self.fp[task], sid, self.retry(task, sid))

    def source(self, task: str, sid: str) -> Source | None:
        """The shard's current label file as a source of answers; None without one."""
        if sid not in self.labels[task]:
            return None
        return Source(task, self.fp[task], sid, self.retry(task, sid))

    def retry(self, task: str, sid: str) -> int:
        """The number of the latest retry of a shard; 0 without one."""
        return self.retries[task].get(sid, 0)


class Source(NamedTuple):
    """A label file with answers that can be reused; its key is made where it is read.

    Work items share these strings: a job may have millions of sources.
    """

    task: str
    fp: str
    sid: str
    retry: int = 0

    @property
    def key(self) -> str:
        return label_key(*self)


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A shard and what to make for it: labels of these tasks, and perhaps the documents file."""

    shard: Shard
    tasks: tuple[str, ...]
    documents: bool
    # By `<task>/<fp>`, label files with answers that can be reused; earlier ones count more.
    sources: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    retry: int = 0  # the number of this retry of failed rows; 0: the labels are missing
    # The current label files of other tasks, which conditions name, by task.
    known: Mapping[str, str] = field(default_factory=dict)
    # The most rows that no source answers for the model; None: not known yet.
    rows_without_answer: int | None = None

    @property
    def asked_rows(self) -> int:
        """The most rows that the model reads."""
        if not self.tasks:
            return 0
        return self.shard.rows if self.rows_without_answer is None else self.rows_without_answer


def committed(
    store: Store,
    fp: Mapping[str, str],
    sids: Collection[str],
    *,
    documents: Mapping[str, str] | None = None,
) -> Committed:
    """The existing files of these shards for these tasks.

    Makes two LISTs for each task, and one of the documents unless they are passed.
    """
    # — the strings that are in memory already; None for a shard whose files do not count
    interned = {sid: sid for sid in sids}.get
    with ThreadPoolExecutor(CONCURRENT_LISTS) as pool:
        listed = pool.map(lambda task: _list_labels(store, task, fp[task], interned), fp)
        if documents is None:
            documents = {sid: etag for sid, _, etag in _list_files(store, DOCUMENTS, interned)}
        labels, retries = {}, {}
        for task, files in zip(fp, listed, strict=True):
            labels[task], retries[task] = files
    return Committed(dict(fp), documents, labels, retries)


def is_whole(shard: Shard, tasks: Collection[str], done: Committed) -> bool:
    """Whether the shard has its documents file and the labels of all tasks."""
    sid = shard.id
    return sid in done.documents and all(sid in done.labels[task] for task in tasks)


def remaining(shards: Sequence[Shard], tasks: Collection[str], done: Committed) -> list[WorkItem]:
    """The work items for everything that is missing, in the order of the shards."""
    items = []
    for shard in shards:
        if not is_whole(shard, tasks, done):
            absent = tuple(task for task in tasks if shard.id not in done.labels[task])
            items.append(WorkItem(shard, absent, documents=shard.id not in done.documents))
    return items


def unfinished(work_items: Sequence[WorkItem], done: Committed) -> list[WorkItem]:
    """The retries among the items whose files do not exist yet."""
    left = []
    for item in work_items:
        tasks = tuple(t for t in item.tasks if done.retry(t, item.shard.id) < item.retry)
        if tasks:
            left.append(replace(item, tasks=tasks))
    return left


def record_specs(store: Store, versions: Iterable[tuple[str, Fingerprint]]) -> None:
    """Creates the file of each task's version; StorageError if one has other content."""
    for task, version in versions:
        key, content = spec_key(task, version.id), version.json()
        if not store.create(key, content) and store.read(key) != content:
            raise StorageError(
                f"{store.url}/{key}: its content was changed and no longer matches the "
                f"fingerprint; restore it, or delete it and run again"
            )


def stored_fps(store: Store, task: str) -> list[str]:
    """The fingerprints of the task whose content the output has."""
    keys = [(stored.key, parse_key(stored.key)) for stored in store.list(f"{SPECS}{task}/")]
    return [parts.fp for key, parts in keys if parts and key == spec_key(task, parts.fp)]


def stored_version(store: Store, task: str, fp: str) -> Fingerprint:
    """The content of a fingerprint, as the output has it; a damaged file counts as empty."""
    try:
        content = parse_json(store.read(spec_key(task, fp)))
    except ValueError:
        content = None
    return Fingerprint(content if isinstance(content, dict) else {})


def equal_versions(store: Store, task: str, version: Fingerprint) -> list[str]:
    """The stored fingerprints of other versions of the task with equal raw answers."""
    return [
        fp
        for fp in stored_fps(store, task)
        if fp != version.id and stored_version(store, task, fp).raw.id == version.raw.id
    ]


def _list_labels(
    store: Store, task: str, fp: str, interned: Interned
) -> tuple[dict[str, str], dict[str, int]]:
    """By shard, the etag of the file with the highest number, and the number of a retry."""
    etags: dict[str, str] = {}
    retries: dict[str, int] = {}
    for folder in label_folders(task, fp):
        for sid, number, etag in _list_files(store, folder, interned):
            if number >= retries.get(sid, 0):
                etags[sid] = etag
                if number:
                    retries[sid] = number
    return etags, retries


def _list_files(store: Store, prefix: str, interned: Interned) -> Iterator[tuple[str, int, str]]:
    """The shard, number and etag of each file of the shards; other files are not looked at."""
    for stored in store.list(prefix):
        key = parse_key(stored.key)
        sid = interned(key.sid) if key else None
        if key is not None and sid is not None:
            yield sid, key.number, stored.etag
