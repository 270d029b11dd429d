"""The ledger: where each answer is kept, which are there, and which are still to make.

Knows keys. Knows nothing of what the files hold, of how they are made, or of snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

from pipeline.data.shards import Shard
from pipeline.data.storage import Store, StoredObject


@dataclass(frozen=True, slots=True)
class Committed:
    """What a LIST found, by shard id; being there is being done."""

    documents: Mapping[str, StoredObject]
    labels: Mapping[str, Mapping[str, StoredObject]]  # by task first


@dataclass(frozen=True, slots=True)
class Work:
    """A shard with something missing: these tasks' labels, perhaps the documents file."""

    shard: Shard
    tasks: tuple[str, ...]
    documents: bool


def label_key(task: str, fp: str, sid: str) -> str:
    """Where a shard's labels for one version of a task are."""
    return f"labels/{task}/{fp}/{sid[:2]}/{sid}.parquet"


def documents_key(sid: str) -> str:
    """Where a shard's documents file is."""
    return f"documents/{sid}.parquet"


def spec_key(task: str, fp: str) -> str:
    """Where the words that a fingerprint stands for are."""
    return f"specs/{task}/{fp}.json"


def committed(store: Store, tasks: Mapping[str, str]) -> Committed:
    """What is there for these tasks (name to fingerprint): one LIST each, and one for documents."""
    return Committed(
        documents=_by_sid(store, "documents/", documents_key),
        labels={
            task: _by_sid(store, f"labels/{task}/{fp}/", partial(label_key, task, fp))
            for task, fp in tasks.items()
        },
    )


def remaining(shards: Sequence[Shard], tasks: Collection[str], done: Committed) -> list[Work]:
    """The shards with something still to make, and what, in their given order."""
    works = (_missing(shard, tasks, done) for shard in shards)
    return [work for work in works if work.tasks or work.documents]


def record_specs(store: Store, tasks: Mapping[str, str], contents: Mapping[str, bytes]) -> None:
    """Writes down what each task's fingerprint stands for; what is written already stays."""
    for task, fp in tasks.items():
        store.create(spec_key(task, fp), contents[task])


def _missing(shard: Shard, tasks: Collection[str], done: Committed) -> Work:
    sid = shard.id
    absent = tuple(task for task in tasks if sid not in done.labels[task])
    return Work(shard, absent, documents=sid not in done.documents)


def _by_sid(store: Store, prefix: str, key_of: Callable[[str], str]) -> dict[str, StoredObject]:
    found = ((PurePosixPath(stored.key).stem, stored) for stored in store.list(prefix))
    # — a name that only resembles a shard's, such as a copy someone made, is not the shard
    return {sid: stored for sid, stored in found if stored.key == key_of(sid)}
