"""The ledger: where each answer is kept, which are there, and which are still to make.

Knows keys. Knows nothing of what the files hold, of how they are made, or of snapshots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
from pipeline.stores.store import Store

# An object store answers a LIST a thousand keys at a time, each in about a tenth of a second: the
# labels of 200,000 shards are 200 answers. More lists at once would fill the memory.
LISTS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class File:
    """A file of results, as a snapshot names it."""

    key: str
    etag: str


@dataclass(frozen=True, slots=True)
class Committed:
    """What a LIST found of some shards, by shard id; being there is being done.

    Etags alone are kept, for a key follows from the shard: of 200,000 shards there are millions.
    """

    fp: Mapping[str, str]  # by task
    documents: Mapping[str, str]  # the etag
    labels: Mapping[str, Mapping[str, str]]  # the etag; by task first
    retries: Mapping[str, Mapping[str, tuple[int, str]]]  # the highest number, and its etag

    def documents_file(self, sid: str) -> File:
        """The shard's documents file."""
        return File(documents_key(sid), self.documents[sid])

    def label_file(self, task: str, sid: str) -> File:
        """The file that holds the shard's labels: the latest retry of it, where there is one."""
        fp, retry = self.fp[task], self.retries[task].get(sid)
        if retry is None:
            return File(label_key(task, fp, sid), self.labels[task][sid])
        number, etag = retry
        return File(label_key(task, fp, sid, number), etag)

    def retry(self, task: str, sid: str) -> int:
        """How many times the shard's failed rows were tried again."""
        return self.retries[task].get(sid, (0, ""))[0]


@dataclass(frozen=True, slots=True)
class ReusableShard:
    """A shard whose answers can be taken over where the text is the same."""

    sid: str
    labels: Mapping[str, str]  # the label file's key, by task


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A shard with something missing: these tasks' labels, perhaps the documents file."""

    shard: Shard
    tasks: tuple[str, ...]
    documents: bool
    reuse: tuple[ReusableShard, ...] = field(default=())  # each has all of the tasks
    retry: int = 0  # 0: the labels are missing; else what number the next try has

    @property
    def asks(self) -> bool:
        """Whether a model is sure to be needed, or likely; not where the shard has its answers."""
        has_answers = any(shard.sid == self.shard.id for shard in self.reuse)
        return bool(self.tasks) and (self.retry > 0 or not has_answers)


# tasks, and shards that have all of them
_Known = tuple[tuple[str, ...], tuple[ReusableShard, ...]]


def committed(store: Store, fp: Mapping[str, str], sids: Collection[str]) -> Committed:
    """What is there of these shards for these tasks (name to fingerprint).

    One LIST for the documents, and two a task, side by side.
    """
    known = {sid: sid for sid in sids}
    with ThreadPoolExecutor(LISTS_AT_ONCE) as pool:
        documents = pool.submit(lambda: dict(_documents(store, known)))
        labels = pool.map(lambda task: dict(_labels(store, task, fp[task], known)), fp)
        retries = pool.map(lambda task: _retries(store, task, fp[task], known), fp)
        return Committed(
            fp=dict(fp),
            documents=documents.result(),
            labels=dict(zip(fp, labels, strict=True)),
            retries=dict(zip(fp, retries, strict=True)),
        )


def committed_others(
    store: Store, done: Committed, versions: Mapping[str, Sequence[str]], sids: Collection[str]
) -> list[Committed]:
    """What is there for other versions of the tasks: fingerprints, by task."""
    known = {sid: sid for sid in sids}
    return [
        Committed(
            fp={task: fp},
            documents=done.documents,
            labels={task: dict(_labels(store, task, fp, known))},
            retries={task: _retries(store, task, fp, known)},
        )
        for task, fps in versions.items()
        for fp in fps
    ]


def remaining(
    shards: Sequence[Shard],
    tasks: Collection[str],
    done: Committed,
    earlier: Mapping[str, Sequence[Collection[str]]],
    others: Sequence[Committed] = (),
) -> list[WorkItem]:
    """The shards with something still to make, and what, in their given order.

    `earlier` has, by path, the ids of the shards that each other version of the object was cut
    into, the newest first; `others` what is there of other versions of the tasks whose raw answers
    are the same.
    """
    answers = _ReuseIndex(done, earlier, others)
    return [
        work
        for shard in shards
        if not is_whole(shard.id, tasks, done)
        for work in _missing(shard, tasks, done, answers)
    ]


def missing_tasks(
    shards: Sequence[Shard], tasks: Collection[str], done: Committed
) -> tuple[str, ...]:
    """The tasks of which a shard has no labels."""
    return tuple(
        task for task in tasks if any(shard.id not in done.labels[task] for shard in shards)
    )


def is_whole(sid: str, tasks: Collection[str], done: Committed) -> bool:
    """Whether the shard has its documents file and every one of the tasks' labels."""
    return sid in done.documents and _has_all(sid, tasks, done)


def unfinished(work_items: Sequence[WorkItem], done: Committed) -> list[WorkItem]:
    """Those of the retries that are not there yet."""
    left = (
        (work, [task for task in work.tasks if done.retry(task, work.shard.id) < work.retry])
        for work in work_items
        if work.retry
    )
    return [WorkItem(w.shard, tuple(tasks), False, w.reuse, w.retry) for w, tasks in left if tasks]


def record_specs(store: Store, fp: Mapping[str, str], contents: Mapping[str, bytes]) -> None:
    """Writes down what each task's fingerprint stands for; what is written already stays."""
    for task, of in fp.items():
        key = spec_key(task, of)
        if not store.create(key, contents[task]) and store.read(key) != contents[task]:
            raise StorageError(
                f"{store.url}/{key}: is not what this task's fingerprint stands for: someone "
                f"changed it; restore it, or delete it to have it written again"
            )


class _ReuseIndex:
    """Where answers can be taken over; those for a path, once made, are shared by its shards."""

    def __init__(
        self,
        done: Committed,
        versions: Mapping[str, Sequence[Collection[str]]],
        others: Sequence[Committed],
    ) -> None:
        self._done = done
        self._versions = versions
        self._others = others
        self._made: dict[tuple[str, tuple[str, ...]], list[_Known]] = {}

    def of(self, path: str, tasks: tuple[str, ...]) -> list[_Known]:
        """The tasks, apart where earlier shards of the path answer some of them alone.

        Each part with the shards that have all of it: nothing is asked about a text again because
        another task, one that is new, has no answer yet.
        """
        if not tasks or path not in self._versions:
            return [(tasks, ())]
        made = self._made.get((path, tasks))
        if made is None:
            made = self._made[path, tasks] = list(self._parts(path, tasks))
        return made

    def _parts(self, path: str, tasks: tuple[str, ...]) -> Iterator[_Known]:
        parts: dict[tuple[str, ...], list[str]] = {}
        for task in tasks:
            parts.setdefault(self._latest(path, task), []).append(task)
        for part in parts.values():
            yield tuple(part), tuple(self._with_all(path, part))

    def _latest(self, path: str, task: str) -> tuple[str, ...]:
        """The shards that answer the task: of the newest versions, down to one that is whole.

        Those before it have few texts more, and tasks that differ in them alone stay together.
        """
        found: list[str] = []
        for sids in self._versions[path]:
            there = [sid for sid in sids if self.of_shard(sid, (task,)) is not None]
            found += there
            if there and len(there) == len(sids):
                break
        return tuple(found)

    def _with_all(self, path: str, tasks: Sequence[str]) -> Iterator[ReusableShard]:
        for sid in chain.from_iterable(self._versions[path]):
            there = self.of_shard(sid, tasks)
            if there is not None and len(there.labels) == len(tasks):
                yield there

    def of_shard(self, sid: str, tasks: Sequence[str]) -> ReusableShard | None:
        """The shard itself, with those of the tasks whose answers are there; None without any."""
        if sid not in self._done.documents:
            return None
        keys = {
            task: version.label_file(task, sid).key
            for version in (*reversed(self._others), self._done)  # the tasks' own stand
            for task in tasks
            if sid in version.labels.get(task, ())
        }
        return ReusableShard(sid, keys) if keys else None


def _missing(
    shard: Shard, tasks: Collection[str], done: Committed, earlier: _ReuseIndex
) -> Iterator[WorkItem]:
    """What the shard lacks; apart from the rest, the tasks whose answers are there already."""
    sid = shard.id
    absent = tuple(task for task in tasks if sid not in done.labels[task])
    there = earlier.of_shard(sid, absent)
    if there is not None:
        known = tuple(task for task in absent if task in there.labels)
        yield WorkItem(shard, known, documents=False, reuse=(there,))
        absent = tuple(task for task in absent if task not in there.labels)
    documents = sid not in done.documents
    if absent or documents:
        for part, shards in earlier.of(shard.path, absent):
            yield WorkItem(shard, part, documents=documents, reuse=shards)


def _has_all(sid: str, tasks: Collection[str], done: Committed) -> bool:
    return all(sid in done.labels[task] for task in tasks)


def _documents(store: Store, sids: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for stored in store.list(DOCUMENTS):
        # — a copy that somebody made under a similar name has no valid key
        key = parse_key(stored.key)
        if key and key.sid in sids:
            yield sids[key.sid], stored.etag


def _labels(store: Store, task: str, fp: str, sids: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for stored in store.list(label_folders(task, fp)[0]):
        key = parse_key(stored.key)
        if key and key.sid in sids:
            yield sids[key.sid], stored.etag


def _retries(
    store: Store, task: str, fp: str, sids: Mapping[str, str]
) -> dict[str, tuple[int, str]]:
    """The highest number of each shard, with its etag."""
    latest: dict[str, tuple[int, str]] = {}
    for stored in store.list(label_folders(task, fp)[1]):
        key = parse_key(stored.key)
        if key and key.sid in sids:
            retry = key.number, stored.etag
            latest[sids[key.sid]] = max(latest.get(key.sid, retry), retry)
    return latest
