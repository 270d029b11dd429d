"""What an output has and what it lacks. Entry points: `committed` and `remaining`.

A cell is the answers to one task about one shard: one file. It is done if the file exists.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from pipeline.errors import StorageError
from pipeline.ledger.keys import (
    DOCUMENTS,
    documents_key,
    label_folders,
    label_key,
    parse_key,
    spec_key,
)
from pipeline.sources.shards import Shard
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


@dataclass(frozen=True, slots=True)
class Committed:
    """The files of some shards that a LIST shows, by shard id.

    Only etags are kept, because a job of 200,000 shards has millions of keys: each key follows
    from its shard and task.
    """

    fp: Mapping[str, str]  # by task
    documents: Mapping[str, str]  # etags
    labels: Mapping[str, Mapping[str, str]]  # etags; by task first
    retries: Mapping[str, Mapping[str, tuple[int, str]]]  # the highest number and its etag

    def documents_file(self, sid: str) -> File:
        return File(documents_key(sid), self.documents[sid])

    def label_file(self, task: str, sid: str) -> File:
        """The file with the shard's current labels: its latest retry, else the first try."""
        number, etag = self.retries[task].get(sid) or (0, self.labels[task][sid])
        return File(label_key(task, self.fp[task], sid, number), etag)

    def retry(self, task: str, sid: str) -> int:
        """The number of the shard's latest retry; 0 without one."""
        return self.retries[task].get(sid, (0, ""))[0]


@dataclass(frozen=True, slots=True)
class ReusableShard:
    """A shard with answers that can be reused for equal texts."""

    sid: str
    labels: Mapping[str, str]  # the label file's key, by task


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A shard and what to make for it: labels of these tasks, and perhaps the documents file."""

    shard: Shard
    tasks: tuple[str, ...]
    documents: bool
    reuse: tuple[ReusableShard, ...] = field(default=())  # each has answers to all of the tasks
    retry: int = 0  # the number of this retry of failed rows; 0: the labels are missing
    to_ask: int | None = None  # rows that no reusable shard answers; None: not known yet
    classified: bool = False  # classifiers answer the tasks: the model reads nothing
    # The texts that are asked, if not all: their hashes as `text_index.Hashes`, in rising order.
    texts: bytes = b""

    @property
    def rows(self) -> int:
        """The rows that progress counts: of a list of texts, one for each."""
        return self.open_rows if self.texts else self.shard.rows

    @property
    def open_rows(self) -> int:
        """The most rows that have no answer yet."""
        if not self.tasks:
            return 0
        return self.shard.rows if self.to_ask is None else self.to_ask

    @property
    def asked_rows(self) -> int:
        """The most rows that the model reads."""
        return 0 if self.classified else self.open_rows

    @property
    def asks(self) -> bool:
        """Whether the item probably needs a model: not if its rows have answers already."""
        return self.asked_rows > 0


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


def remaining(
    shards: Sequence[Shard],
    tasks: Collection[str],
    done: Committed,
    others: Sequence[Committed] = (),
) -> list[WorkItem]:
    """The work items for everything that is missing, in the order of the shards.

    `others` has the files of other versions of the tasks with the same raw answers.
    """
    answers = Answers(done, others)
    return [
        item
        for shard in shards
        if not is_whole(shard.id, tasks, done)
        for item in _missing(shard, tasks, done, answers)
    ]


def missing_tasks(
    shards: Sequence[Shard], tasks: Collection[str], done: Committed
) -> tuple[str, ...]:
    """The tasks for which a shard has no labels."""
    return tuple(
        task for task in tasks if any(shard.id not in done.labels[task] for shard in shards)
    )


def is_whole(sid: str, tasks: Collection[str], done: Committed) -> bool:
    """Whether the shard has its documents file and the labels of all tasks."""
    return sid in done.documents and all(sid in done.labels[task] for task in tasks)


def unfinished(work_items: Sequence[WorkItem], done: Committed) -> list[WorkItem]:
    """The retries among the items whose files do not exist yet."""
    left = []
    for item in work_items:
        tasks = tuple(t for t in item.tasks if done.retry(t, item.shard.id) < item.retry)
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


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers that count for some tasks: of their own versions, or with equal raw answers."""

    done: Committed
    others: Sequence[Committed] = ()  # other versions of tasks, with the same raw answers

    def of_shard(self, sid: str, tasks: Sequence[str]) -> ReusableShard | None:
        """The shard with the existing answers to some of the tasks; None if it has none."""
        if sid not in self.done.documents:
            return None
        keys = {
            task: version.label_file(task, sid).key
            for version in (*reversed(self.others), self.done)  # last: the tasks' own version
            for task in tasks
            if sid in version.labels.get(task, ())
        }
        return ReusableShard(sid, keys) if keys else None

    def answering(self, task: str) -> frozenset[str]:
        """The shards that have answers to the task."""
        versions = (version.labels.get(task, {}) for version in (self.done, *self.others))
        return frozenset(sid for labels in versions for sid in labels if sid in self.done.documents)


def _missing(
    shard: Shard, tasks: Collection[str], done: Committed, answers: Answers
) -> Iterator[WorkItem]:
    """The shard's work items: one for tasks whose answers another version has, then the rest."""
    sid = shard.id
    absent = tuple(task for task in tasks if sid not in done.labels[task])
    own = answers.of_shard(sid, absent)
    if own is not None:
        answered = tuple(task for task in absent if task in own.labels)
        yield WorkItem(shard, answered, documents=False, reuse=(own,), to_ask=0)
        absent = tuple(task for task in absent if task not in own.labels)
    documents = sid not in done.documents
    if absent or documents:
        yield WorkItem(shard, absent, documents=documents)


# The id of a shard as it is in memory already, or None if its files do not count.
_Known = Callable[[str], str | None]


def _list_files(store: Store, prefix: str, known: _Known) -> dict[str, str]:
    """The etags of one file for each shard. A file with another name is not a shard's."""
    listed = ((parse_key(stored.key), stored) for stored in store.list(prefix))
    return {
        sid: _etag_of(store, stored) for key, stored in listed if key and (sid := known(key.sid))
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
    """The highest number of each shard, with its etag."""
    latest: dict[str, tuple[int, str]] = {}
    for stored in store.list(label_folders(task, fp)[1]):
        key = parse_key(stored.key)
        if key and (sid := known(key.sid)):
            retry = key.number, _etag_of(store, stored)
            latest[sid] = max(latest.get(sid, retry), retry)
    return latest
