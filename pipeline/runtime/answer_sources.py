"""Plans reuse: which label files of the output already answer texts of the shards with work.

Each shard takes over the answers in files of its own, such as those to a smaller sample. Answers of
other shards are looked for by text, but only for shards that are newly cut since the spec's last
snapshot: of new, edited or moved files. So a first run, and one that resumes it, reads and compares
no text before it labels.

Entry points: `newly_cut`, `has_answers` and `plan_reuse`. Must import neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

from pipeline.ledger.cells import (
    Committed,
    WorkItem,
    committed,
    equal_versions,
)
from pipeline.ledger.keys import DOCUMENTS, label_folders, parse_key
from pipeline.ledger.reuse import answered_rows
from pipeline.ledger.snapshots import published_sids
from pipeline.ledger.text_index import (
    Hashes,
    IndexObject,
    candidates,
    hashes_of,
    index_missing_shards,
)
from pipeline.runtime.job import Job, Step
from pipeline.runtime.plan import SMALL_INPUT_SHARDS, Plan
from pipeline.sources.documents import EMPTY
from pipeline.stores.store import Store

# A shard takes answers from at most this many other shards, or from one for this many of its rows;
# the model answers the rest. `StoredAnswers` reads this many at once.
LEAST_SOURCES = 16
ROWS_A_SOURCE = 256
# Hashes of about this many texts are in memory at once, with 50 bytes a text. For each further
# part of the work, the index of texts is read again.
PART_ROWS = 100_000_000

_Numbers = NDArray[np.int32]  # [texts]: the number of a shard with the text; -1: none
# By the shards that answer; then by the shard that asks.
_Places = Mapping[tuple[str, ...], dict[str, _Numbers]]


def newly_cut(job: Job, store: Store, planned: Plan) -> frozenset[str]:
    """The shards with work that the spec's last snapshot does not show; none without a snapshot."""
    published = published_sids(store, job.spec.name)
    if published is None:
        return frozenset()
    return frozenset(w.shard.id for w in planned.work_items if not w.retry) - published


def has_answers(job: Job, store: Store, planned: Plan) -> bool:
    """Whether the output has an answer that the missing tasks may reuse."""
    done = planned.done
    return any(
        # — a LIST of an object store is read to its end: the plan's LIST says it first
        (done.fp.get(step.task) == fp and done.labels[step.task])
        or next(iter(store.list(label_folders(step.task, fp)[0])), None) is not None
        for step, fps in _fps_of_steps(job, store, planned)
        for fp in fps
    )


def plan_reuse(
    job: Job,
    store: Store,
    planned: Plan,
    new: Collection[str],
    *,
    read: Mapping[str, Hashes] | None = None,
    keep: bool = True,
) -> Plan:
    """The plan, whose work items name the label files with answers to their texts.

    These are the files of their own shard, and of a new shard also those of the other shards that
    have most of its texts: at most `LEAST_SOURCES`, or one for `ROWS_A_SOURCE` rows.

    Args:
        job: The job.
        store: The output.
        planned: The plan. A new shard without a documents file stays as it is.
        new: The shards of `newly_cut`.
        read: The hashes of the texts of shards without a documents file, where they are known; then
            the texts of all shards are counted.
        keep: Adds to the index of texts what it lacks; without it, nothing is written, and of a
            large output the answers of shards that the index lacks are not found.
    """
    known, documents = dict(read or {}), dict(planned.done.documents)
    if new:
        documents, planned = _listed_again(store, planned)
    versions = _versions(job, store, planned, documents)
    planned = _with_own_files(store, planned, versions)
    has_texts = documents.keys() | known.keys()
    asking = [w for w in planned.work_items if w.tasks and not w.retry and w.shard.id in has_texts]
    asking = [w for w in asking if w.shard.id in new or read is not None]
    if not asking:
        return planned
    items = list(planned.work_items)
    if keep:
        index_missing_shards(store, documents)
    unstored = None
    if not keep and len(documents) <= SMALL_INPUT_SHARDS:
        unstored = IndexObject.of(hashes_of(store, documents.keys()))
    first = [version for version in versions if version.is_asked_first]
    files = {key for version in first for work in asking for key in version.files_of(work.shard.id)}
    count = partial(answered_rows, store) if len(files) <= SMALL_INPUT_SHARDS else None
    with_sources: dict[int, WorkItem] = {}
    ends = accumulate(work.shard.rows for work in asking)
    for _, pairs in groupby(zip(asking, ends, strict=True), lambda pair: pair[1] // PART_ROWS):
        of_part = [work for work, _ in pairs]
        texts = known | hashes_of(store, {work.shard.id for work in of_part} - known.keys())
        # — the worker that reads a damaged documents file reports it
        part = [work for work in of_part if work.shard.id in texts]
        if not part:
            continue
        sids = list(dict.fromkeys(work.shard.id for work in part))
        places = _places(store, sids, texts, versions, unstored)
        for of_shards in places.values():
            of_shards |= {
                sid: np.full(len(texts[sid]), -1, np.int32) for sid in sids if sid not in new
            }
        with_sources |= {
            id(work): _with_sources(work, texts, versions, places, count) for work in part
        }
    items = [with_sources.get(id(work), work) for work in items]
    return replace(planned, work_items=tuple(items), distinct=_distinct(planned, texts))


def _listed_again(store: Store, planned: Plan) -> tuple[dict[str, str], Plan]:
    """The etags of all documents files by shard, and the plan that knows them."""
    listed = ((parse_key(stored.key), stored.etag) for stored in store.list(DOCUMENTS))
    documents = {key.sid: etag for key, etag in listed if key}
    items = [replace(w, documents=w.shard.id not in documents) for w in planned.work_items]
    return documents, replace(planned, work_items=tuple(items))


def _with_own_files(store: Store, planned: Plan, versions: Sequence[_Version]) -> Plan:
    """The plan, whose work items name the files of their own shard."""
    files = {
        (work.shard.id, version.name): version.files_of(work.shard.id)
        for work in planned.work_items
        if work.tasks and not work.retry and not work.documents
        for version in versions
        if version.task in work.tasks
    }
    is_small = sum(map(len, files.values())) <= SMALL_INPUT_SHARDS
    items = []
    for work in planned.work_items:
        sid = work.shard.id
        own = {v.name: files[sid, v.name] for v in versions if files.get((sid, v.name))}
        if own and not work.retry:
            work = replace(work, sources=own)
            if is_small:
                first = [v.name for v in versions if v.is_asked_first and v.task in work.tasks]
                known = [answered_rows(store, own.get(name, ()), EMPTY) for name in first]
                most = work.shard.rows - min(known, default=work.shard.rows)
                work = replace(work, rows_without_answer=most)
        items.append(work)
    return replace(planned, work_items=tuple(items))


@dataclass(frozen=True, slots=True)
class _Version:
    """The version that a step answers, and the files with its raw answers."""

    task: str
    name: str  # see `version_name`
    is_asked_first: bool  # of the model of the first reader
    files: Sequence[Committed]  # of the version itself, then of those with equal raw answers
    sids: tuple[str, ...]  # the shards with such a file, and with a documents file

    def sources(
        self, sid: str, places: _Numbers, rows: int
    ) -> tuple[tuple[str, ...], NDArray[np.bool_]]:
        """The files with answers to texts of a shard, and which of its texts other shards have."""
        shards, counts = np.unique(places[places >= 0], return_counts=True)
        most = shards[np.argsort(-counts, kind="stable")].tolist()
        others = most[: max(LEAST_SOURCES, rows // ROWS_A_SOURCE)]
        own = self.files_of(sid)
        keys = (*own, *(key for number in others for key in self.files_of(self.sids[number])))
        return keys, np.isin(places, others)

    def files_of(self, sid: str) -> tuple[str, ...]:
        """The files of a shard with raw answers of the version."""
        return tuple(
            done.label_key(self.task, sid) for done in self.files if sid in done.labels[self.task]
        )


def _with_sources(
    work: WorkItem,
    texts: Mapping[str, Hashes],
    versions: Sequence[_Version],
    places: _Places,
    count: Callable[[Sequence[str]], int] | None,  # of the rows that these files answer
) -> WorkItem:
    """The work item with the sources of its answers, and the most texts that the model reads."""
    sources, unanswered, sid = {}, 0, work.shard.id
    for version in versions:
        if version.task in work.tasks:
            sources[version.name], is_answered = version.sources(
                sid, places[version.sids][sid], work.shard.rows
            )
            if version.is_asked_first:
                most = len(np.unique(texts[sid][~is_answered]))
                if most and count is not None:
                    most = min(most, len(texts[sid]) - count(version.files_of(sid)))
                unanswered = max(unanswered, most)
    return replace(work, sources=sources, rows_without_answer=unanswered)


def _fps_of_steps(job: Job, store: Store, planned: Plan) -> Iterator[tuple[Step, list[str]]]:
    """For each step of a missing task its version, and then those of equal raw answers."""
    missing = {task for work in planned.work_items if not work.retry for task in work.tasks}
    for step in job.steps:
        if step.task in missing:
            equal = equal_versions(store, step.task, step.fingerprint)
            yield step, [step.fingerprint.id, *equal]


def _versions(
    job: Job, store: Store, planned: Plan, documents: Mapping[str, str]
) -> list[_Version]:
    versions = []
    for step, fps in _fps_of_steps(job, store, planned):
        task = step.task
        files = [committed(store, {task: fp}, None, documents=documents) for fp in fps]
        sids = {sid for done in files for sid in done.labels[task]} & documents.keys()
        is_first = step.reader == 0 and step.by_model
        versions.append(_Version(task, step.version, is_first, files, tuple(sorted(sids))))
    return versions


def _places(
    store: Store,
    sids: Sequence[str],
    texts: Mapping[str, Hashes],
    versions: Sequence[_Version],
    unstored: IndexObject | None,
) -> _Places:
    """By the shards that answer a version: for each asking shard, in which others its texts are."""
    hashes = np.concatenate([texts[sid] for sid in sids])
    lengths = [len(texts[sid]) for sid in sids]
    places = {}
    for answering in {version.sids for version in versions}:
        numbers = {sid: number for number, sid in enumerate(answering)}
        asking = np.repeat(np.array([numbers.get(sid, -1) for sid in sids], np.int32), lengths)
        at = candidates(store, hashes, numbers, asking, unstored=unstored)
        parts = np.split(at, np.cumsum(lengths)[:-1])
        places[answering] = dict(zip(sids, parts, strict=True))
    return places


def _distinct(planned: Plan, texts: Mapping[str, Hashes]) -> int | None:
    """The number of different texts of the shards with work; None unless `texts` has all."""
    sids = {work.shard.id for work in planned.work_items if not work.retry}
    if not sids <= texts.keys():
        return None
    return len(np.unique(np.concatenate([texts[sid] for sid in sids])))
