"""What an output has and what it lacks. Entry points: `committed` and `remaining`.

A cell is the answers to one task about one shard: one file. It is done if the file exists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain

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

    @property
    def asks(self) -> bool:
        """Whether the item probably needs a model: not if its rows have answers already."""
        own = {self.shard.id, self.shard.whole.id}
        has_answers = any(reusable.sid in own for reusable in self.reuse)
        return bool(self.tasks) and (self.retry > 0 or not has_answers)


@dataclass(frozen=True, slots=True)
class OtherSlices:
    """Shards that have some of the same rows in another slice, or in none."""

    # The same rows of the input as the shard: first without a slice, then the other slices.
    of_shard: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # By path: the slices of earlier versions of the object.
    earlier: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def sids(self) -> frozenset[str]:
        """All of these shards."""
        return frozenset(chain(*self.of_shard.values(), *self.earlier.values()))


_TaskGroup = tuple[tuple[str, ...], tuple[ReusableShard, ...]]  # shards with answers to all tasks


def committed(
    store: Store,
    fp: Mapping[str, str],
    sids: Collection[str],
    *,
    documents: Mapping[str, str] | None = None,
) -> Committed:
    """The existing files of these shards for these tasks.

    Makes two LISTs for each task, concurrently, and one of the documents unless they are passed.
    """
    known = {sid: sid for sid in sids}
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
    earlier_cuts: Mapping[str, Sequence[Collection[str]]],
    others: Sequence[Committed] = (),
    slices: OtherSlices = OtherSlices(),
) -> list[WorkItem]:
    """The work items for everything that is missing, in the order of the shards.

    `earlier_cuts` has, by path, the shard ids of each other version of the object, the newest
    first. `others` has the files of other versions of the tasks with the same raw answers.
    `slices` has the shards that have answers to some of the rows.
    """
    index = _ReuseIndex(done, earlier_cuts, others, slices)
    return [
        item
        for shard in shards
        if not is_whole(shard.id, tasks, done)
        for item in _missing(shard, tasks, done, index)
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
class _ReuseIndex:
    """Finds shards whose answers can be reused. The shards of one path share a result."""

    _done: Committed
    _cuts: Mapping[str, Sequence[Collection[str]]]
    _others: Sequence[Committed]
    _slices: OtherSlices
    _groups: dict[tuple[str, tuple[str, ...]], list[_TaskGroup]] = field(default_factory=dict)

    def of_path(self, path: str, tasks: tuple[str, ...]) -> list[_TaskGroup]:
        """The tasks in groups, each with the earlier shards of the path that answer all of it.

        Tasks are in one group if the same shards answer them. So a new task, which no shard
        answers, does not keep the answers to other tasks from being reused.
        """
        if not tasks or not (path in self._cuts or path in self._slices.earlier):
            return [(tasks, ())]
        if (path, tasks) not in self._groups:
            by_shards: dict[tuple[str, ...], list[str]] = {}
            for task in tasks:
                by_shards.setdefault(self._latest(path, task), []).append(task)
            self._groups[path, tasks] = [
                (tuple(group), tuple(self._with_all(path, group))) for group in by_shards.values()
            ]
        return self._groups[path, tasks]

    def of_rows(self, sid: str, tasks: tuple[str, ...]) -> list[_TaskGroup]:
        """The tasks in groups, each with the slices of the same rows that answer all of it."""
        same_rows = self._slices.of_shard.get(sid, ())
        groups: dict[tuple[str, ...], list[str]] = {}
        for task in tasks if same_rows else ():
            answered = (each for each in same_rows if self.of_shard(each, (task,)))
            groups.setdefault(tuple(answered), []).append(task)
        return [
            (tuple(group), tuple(filter(None, (self.of_shard(each, group) for each in sids))))
            for sids, group in groups.items()
        ] or [(tasks, ())]

    def of_shard(self, sid: str, tasks: Sequence[str]) -> ReusableShard | None:
        """The shard with the existing answers to some of the tasks; None if it has none."""
        if sid not in self._done.documents:
            return None
        keys = {
            task: version.label_file(task, sid).key
            for version in (*reversed(self._others), self._done)  # last: the tasks' own version
            for task in tasks
            if sid in version.labels.get(task, ())
        }
        return ReusableShard(sid, keys) if keys else None

    def _latest(self, path: str, task: str) -> tuple[str, ...]:
        """The shards that answer the task: of the newest cuts, back to one that is complete.

        Older cuts have few other texts. Leaving them out keeps tasks together that differ there.
        """
        latest: list[str] = []
        for sids in self._cuts.get(path, ()):
            answered = [sid for sid in sids if self.of_shard(sid, (task,)) is not None]
            latest += answered
            if answered and len(answered) == len(sids):
                return tuple(latest)
        slices = self._slices.earlier.get(path, ())
        return (*latest, *(sid for sid in slices if self.of_shard(sid, (task,)) is not None))

    def _with_all(self, path: str, tasks: Sequence[str]) -> Iterator[ReusableShard]:
        whole = chain.from_iterable(self._cuts.get(path, ()))
        for sid in chain(whole, self._slices.earlier.get(path, ())):
            shard = self.of_shard(sid, tasks)
            if shard is not None and len(shard.labels) == len(tasks):
                yield shard


def _missing(
    shard: Shard, tasks: Collection[str], done: Committed, index: _ReuseIndex
) -> Iterator[WorkItem]:
    """The shard's work items: one for tasks whose answers another version has, then the rest."""
    sid = shard.id
    absent = tuple(task for task in tasks if sid not in done.labels[task])
    own = index.of_shard(sid, absent)
    if own is not None:
        answered = tuple(task for task in absent if task in own.labels)
        yield WorkItem(shard, answered, documents=False, reuse=(own,))
        absent = tuple(task for task in absent if task not in own.labels)
    documents = sid not in done.documents
    if absent or documents:
        for of_rows, same_rows in index.of_rows(sid, absent):
            for group, shards in index.of_path(shard.path, of_rows):
                # — without slices, the items of one path share one long tuple
                reuse = (*same_rows, *shards) if same_rows else shards
                yield WorkItem(shard, group, documents=documents, reuse=reuse)


def _list_files(store: Store, prefix: str, sids: Mapping[str, str]) -> dict[str, str]:
    """The etags of one file for each shard. A file with another name is not a shard's."""
    listed = ((parse_key(stored.key), stored) for stored in store.list(prefix))
    return {
        sids[key.sid]: _etag_of(store, stored) for key, stored in listed if key and key.sid in sids
    }


def _etag_of(store: Store, stored: StoredObject) -> str:
    """The etag of a file of results; StorageError if it is too short to be one."""
    if stored.size_bytes < LEAST_FILE_BYTES:
        raise StorageError(
            f"{store.url}/{stored.key}: has {stored.size_bytes} bytes of its own, or is a link, so "
            f"it is not a file of results; restore it, or delete it and run again"
        )
    return stored.etag


def _list_retries(
    store: Store, task: str, fp: str, sids: Mapping[str, str]
) -> dict[str, tuple[int, str]]:
    """The highest number of each shard, with its etag."""
    latest: dict[str, tuple[int, str]] = {}
    for stored in store.list(label_folders(task, fp)[1]):
        key = parse_key(stored.key)
        if key and key.sid in sids:
            retry = key.number, _etag_of(store, stored)
            latest[sids[key.sid]] = max(latest.get(key.sid, retry), retry)
    return latest
