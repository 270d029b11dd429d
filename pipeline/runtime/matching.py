"""Which texts of new shards the output has answers to, and which several new shards have.

Entry point: `matched`. What other shards answer is taken over. What several new shards have is
asked once, before these shards are labelled. Must import neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from pipeline.hashes import short_hash
from pipeline.ledger.cells import Answers, ReusableShard, WorkItem, committed
from pipeline.ledger.text_index import Hashes, candidates, cover
from pipeline.runtime.job import Job, Plan, answers_of
from pipeline.sources.shards import Shard, Slice
from pipeline.stores.store import Store


def matched(
    job: Job,
    store: Store,
    planned: Plan,
    *,
    read: Mapping[str, Hashes] | None = None,
    keep: bool = True,
    newest: bool = False,
) -> Plan:
    """The plan, whose work items now name the shards with answers to their texts.

    Tasks of one shard that other shards answer become a work item of their own. `Plan.repeated`
    has the texts that several shards lack an answer to.

    Args:
        job: The job.
        store: The output.
        planned: The plan. A shard without a documents file stays as it is.
        read: The hashes of the texts of such shards, where they are known all the same.
        keep: Adds to the index of texts what it lacks; without it, nothing is written.
        newest: Takes the answers of the shard that was labelled last, not first: texts that failed
            and were asked again in a slice of their own have both.
    """
    tasks = sorted({task for work in planned.work_items if _is_open(work) for task in work.tasks})
    if not tasks:
        return planned
    done = committed(store, {task: job.fp[task] for task in tasks}, None)
    known = dict(read or {})
    open_items = [
        work
        for work in planned.work_items
        if _is_open(work) and (work.shard.id in done.documents or work.shard.id in known)
    ]
    if not open_items:
        return planned
    answers = answers_of(job, store, tasks, done, None)
    needed = {work.shard.id for work in open_items if work.shard.id not in known}
    texts = known | cover(store, done.documents, needed, keep=keep)
    sids = sorted(done.documents)
    numbers = {sid: number for number, sid in enumerate(sids)}
    groups = []
    for answering, of_tasks in _by_answering(answers, tasks).items():
        of_answering = {sid: numbers[sid] for sid in answering}
        asking = [work.shard.id for work in open_items if not of_tasks.isdisjoint(work.tasks)]
        of_texts = {sid: texts[sid] for sid in asking}
        groups.append(_Group.of(store, of_tasks, of_answering, of_texts, newest=newest))
    # — a shard with answers to the texts of many new shards is one object
    reusable = cache(answers.of_shard)
    chosen = set(map(id, open_items))
    items = [
        item
        for work in planned.work_items
        for item in (_parts(work, reusable, groups, sids) if id(work) in chosen else [work])
    ]
    repeated = tuple(item for work in open_items for item in _repeated(work, groups))
    distinct = _distinct(planned, texts)
    return replace(planned, work_items=tuple(items), repeated=repeated, distinct=distinct)


def _is_open(work: WorkItem) -> bool:
    """Whether nothing is known yet of other answers to the item's texts."""
    return bool(work.tasks) and not work.retry and work.to_ask is None


def _distinct(planned: Plan, texts: Mapping[str, Hashes]) -> int | None:
    """The number of different texts of the shards with work; None unless all are known."""
    sids = {work.shard.id for work in planned.work_items if not work.retry}
    if not sids <= texts.keys():
        return None
    return len(np.unique(np.concatenate([texts[sid] for sid in sids])))


@dataclass(frozen=True, slots=True)
class _Group:
    """Tasks that the same shards answer, and what that means for the texts of new shards."""

    tasks: frozenset[str]
    sources: Mapping[str, NDArray[np.int32]]  # by shard: the number of a shard for each text, or -1
    to_ask: Mapping[str, int]  # by shard: texts without an answer that no other new shard has
    repeated: Mapping[str, Hashes]  # by shard: the others, if it is the first shard that has them

    @classmethod
    def of(
        cls,
        store: Store,
        tasks: frozenset[str],
        answering: Mapping[str, int],
        texts: Mapping[str, Hashes],
        *,
        newest: bool,
    ) -> _Group:
        """The group of tasks that the numbered shards `answering` answer."""
        hashes = np.concatenate([*texts.values()])
        numbers = candidates(store, hashes, answering, newest=newest)
        edges = np.cumsum([0, *map(len, texts.values())])
        sources = {
            sid: numbers[start:end]
            for sid, start, end in zip(texts, edges, edges[1:], strict=False)
        }
        unanswered = [np.unique(texts[sid][of_texts < 0]) for sid, of_texts in sources.items()]
        hashes = np.concatenate(unanswered)
        shards = np.repeat(np.arange(len(texts)), [*map(len, unanswered)])
        order = np.argsort(hashes, kind="stable")  # of equal hashes, the first shard's comes first
        hashes, shards = hashes[order], shards[order]
        equal = hashes[1:] == hashes[:-1]  # to the one before it
        is_first, is_last = np.append(True, ~equal), np.append(~equal, True)
        alone = (is_first & is_last)[: len(hashes)]
        owned = (is_first & ~is_last)[: len(hashes)]
        owners = np.argsort(shards[owned], kind="stable")
        parts = np.split(
            hashes[owned][owners],
            np.searchsorted(shards[owned][owners], np.arange(1, len(texts))),
        )
        to_ask = np.bincount(shards[alone], minlength=len(texts)).tolist()
        return cls(
            tasks,
            sources,
            to_ask=dict(zip(texts, to_ask, strict=True)),
            repeated={sid: part for sid, part in zip(texts, parts, strict=True) if len(part)},
        )


def _by_answering(answers: Answers, tasks: Sequence[str]) -> dict[frozenset[str], frozenset[str]]:
    """The tasks that the same shards answer, by these shards."""
    groups: dict[frozenset[str], set[str]] = {}
    for task in tasks:
        groups.setdefault(answers.answering(task), set()).add(task)
    return {answering: frozenset(of_tasks) for answering, of_tasks in groups.items()}


def _parts(
    work: WorkItem,
    reusable: Callable[[str, tuple[str, ...]], ReusableShard | None],
    groups: Sequence[_Group],
    sids: Sequence[str],
) -> Iterator[WorkItem]:
    """The item's tasks in parts, each with the shards that answer all of its tasks."""
    sid = work.shard.id
    parts: dict[bytes, list[_Group]] = {}
    for group in groups:
        if not group.tasks.isdisjoint(work.tasks):
            parts.setdefault(group.sources[sid].tobytes(), []).append(group)
    for alike in parts.values():
        tasks = tuple(task for task in work.tasks if any(task in group.tasks for group in alike))
        sources = alike[0].sources[sid]
        shards, counts = np.unique(sources[sources >= 0], return_counts=True)
        # — the shard that answers most texts first: fewer files are read
        by_count = shards[np.argsort(-counts, kind="stable")]
        reuse = (reusable(sids[number], tasks) for number in by_count)
        yield replace(
            work,
            tasks=tasks,
            documents=False,
            reuse=tuple(shard for shard in reuse if shard is not None),
            to_ask=max(group.to_ask[sid] for group in alike),
        )


def _repeated(work: WorkItem, groups: Sequence[_Group]) -> Iterator[WorkItem]:
    """The item's texts that other shards have too, if it is the first shard that has them."""
    shard = work.shard
    tasks_of: dict[bytes, list[str]] = {}  # by texts
    for group in groups:
        hashes = group.repeated.get(shard.id)
        if hashes is not None:
            tasks_of.setdefault(hashes.tobytes(), []).extend(
                task for task in work.tasks if task in group.tasks
            )
    for texts, tasks in tasks_of.items():
        yield replace(texts_item(shard, tasks, texts), classified=work.classified)


def texts_item(shard: Shard, tasks: Sequence[str], texts: bytes, *, salt: str = "") -> WorkItem:
    """The work item of a slice of the shard: the first document with each of these texts.

    Args:
        shard: The shard.
        tasks: The tasks that are asked.
        texts: The hashes of the texts, as `WorkItem.texts` has them.
        salt: What makes it another slice than that of the same texts with another salt.
    """
    part = replace(shard.slice or Slice(), texts=short_hash(texts + salt.encode()))
    count = len(texts) // np.dtype(np.uint64).itemsize
    item = WorkItem(replace(shard, slice=part), tuple(tasks), documents=True)
    return replace(item, to_ask=count, texts=texts)
