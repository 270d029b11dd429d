"""Plans reuse: which label files of the output already answer texts of the shards with work.

Each shard takes over the answers in files of its own: to a smaller sample, or, in a retry, of the
rows that did not fail. Answers of other shards are looked for by text, but only for shards that
are newly cut since the spec's last snapshot: of new, edited or moved files. So a first run, and one
that resumes it, reads and compares no text before it labels.

Entry points: `answering`, `newly_cut` and `plan_reuse`. Must import neither torch nor Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.ledger.cells import Committed, Source, WorkItem, committed, equal_versions
from pipeline.ledger.counts_log import OBJECT, object_hashes
from pipeline.ledger.snapshots import known_counts, last_files
from pipeline.ledger.text_index import (
    Hashes,
    KnownTexts,
    index_missing_shards,
    not_indexed,
    read_texts,
    shards_with_texts,
)
from pipeline.runtime.job import Job, Step
from pipeline.runtime.plan import SMALL_INPUT_SHARDS, Plan
from pipeline.stores.store import Store

# A shard takes answers from at most this many other shards, or from one for this many of its rows;
# the model answers the rest.
LEAST_SOURCES = 16
ROWS_A_SOURCE = 256


@dataclass(frozen=True, slots=True)
class Answering:
    """The label files with the raw answers of a step."""

    step: Step
    files: tuple[Committed, ...]  # of its version, then of others with equal raw answers

    @property
    def sids(self) -> set[str]:
        """The shards with such a file."""
        return {sid for done in self.files for sid in done.labels[self.step.task]}

    def of(self, sid: str) -> tuple[Source, ...]:
        """The files of a shard."""
        found = (done.source(self.step.task, sid) for done in self.files)
        return tuple(source for source in found if source is not None)


def answering(job: Job, store: Store, planned: Plan, new: Collection[str]) -> list[Answering]:
    """For each step of a missing task the files with its answers; steps without any are left out.

    These are files of the shards with work; with new shards, those of all shards of the output.
    """
    sids = None if new else {work.shard.id for work in planned.work_items}
    missing = {task for work in planned.work_items for task in work.tasks}
    found = []
    for step in job.steps:
        if step.task in missing:
            fps = [step.fingerprint.id, *equal_versions(store, step.task, step.fingerprint)]
            of_step = [committed(store, {step.task: fp}, sids, documents={}) for fp in fps]
            found.append(Answering(step, tuple(done for done in of_step if done.labels[step.task])))
    return [own for own in found if own.files]


def newly_cut(job: Job, store: Store, planned: Plan) -> frozenset[str]:
    """The shards with work that the spec's last snapshot does not show; none without a snapshot.

    Of a spec without one, the current snapshot counts.
    """
    published = last_files(store, job.spec.name)
    if published is None and (published := last_files(store, None)) is None:
        return frozenset()
    asking = {work.shard.id for work in planned.work_items if not work.retry}
    return frozenset(asking.difference(published["sid"].unique().to_pylist()))


def plan_reuse(
    job: Job,
    store: Store,
    planned: Plan,
    answers: Sequence[Answering],
    new: Collection[str],
    *,
    read: Mapping[str, Hashes] | None = None,
) -> Plan:
    """The plan, whose work items name the label files with answers to their texts.

    These are the files of their own shard, and of a new shard also those of the other shards that
    have most of its texts: at most `LEAST_SOURCES`, or one for `ROWS_A_SOURCE` rows.

    Args:
        job: The job.
        store: The output.
        planned: The plan. A new shard whose texts are not known stays as it is.
        answers: Those of `answering`.
        new: The shards of `newly_cut`.
        read: For a dry run, the hashes of the texts of shards. Nothing is written, and of a large
            output the answers of shards that the index lacks are not found. Without it, shards
            have documents files, and the index gets what it lacks.
    """
    by_text = {
        work.shard.id: max(LEAST_SOURCES, work.shard.rows // ROWS_A_SOURCE)
        for work in planned.work_items
        if work.shard.id in new and work.tasks and not work.retry
        if (not work.documents if read is None else work.shard.id in read)
    }
    known = _known_texts(store, by_text, answers, read) if by_text else {}
    left = _left_by_own_files(job, store, planned, answers)
    by_version = {own.step.version: own for own in answers}

    @cache  # — work items share what they take answers from
    def sources_of(version: str, sid: str) -> tuple[Source, ...]:
        return by_version[version].of(sid) if version in by_version else ()

    def with_sources(work: WorkItem) -> WorkItem:
        sid, rows = work.shard.id, work.asked_rows
        texts = known.get(sid, KnownTexts(rows))
        sources, asked = {}, [0]
        for step in (step for step in job.steps if step.task in work.tasks):
            own = () if work.documents else sources_of(step.version, sid)
            others = {other: sources_of(step.version, other) for other in texts.sources}
            if keys := (*own, *chain.from_iterable(others.values())):
                sources[step.version] = keys
            if _is_asked_first(step):
                new_texts = texts.texts - sum(
                    texts.sources[other] for other, files in others.items() if files
                )
                asked.append(min(rows, new_texts, left.get((sid, step.version), rows)))
        if not sources:
            return work
        return replace(work, sources=sources, rows_without_answer=max(asked))

    return replace(planned, work_items=tuple(map(with_sources, planned.work_items)))


def _known_texts(
    store: Store,
    by_text: Mapping[str, int],
    answers: Sequence[Answering],
    read: Mapping[str, Hashes] | None,
) -> dict[str, KnownTexts]:
    """For each of these shards, the others with answers to most of its texts."""
    counts = Counter(sid for own in answers for sid in own.sids)
    # — of shards with equal texts, one that answers most questions
    sources = sorted(counts, key=lambda sid: (-counts[sid], sid))
    if read is None:
        index_missing_shards(store, dict.fromkeys((*sources, *by_text)))
        return shards_with_texts(store, by_text, sources)
    lacking = not_indexed(store, [sid for sid in sources if sid not in read])
    few = lacking if len(lacking) <= SMALL_INPUT_SHARDS else []
    return shards_with_texts(
        store, by_text, sources, unstored={**read, **dict(read_texts(store, few))}
    )


def _left_by_own_files(
    job: Job, store: Store, planned: Plan, answers: Sequence[Answering]
) -> dict[tuple[str, str], int]:
    """The most rows of a shard without an answer in its own files, where their counts are known.

    By shard and version, for the questions to the first model.
    """
    files = [
        ((work.shard.id, own.step.version), done.label_key(task, work.shard.id), etag)
        for own in answers
        if _is_asked_first(own.step)
        for task in [own.step.task]
        for work in planned.work_items
        if task in work.tasks and not work.documents
        for done in own.files
        if (etag := done.labels[task].get(work.shard.id)) is not None
    ]
    if not files:
        return {}
    places, keys, etags = zip(*files, strict=True)
    objects = object_hashes(pa.table({"key": keys, "etag": etags}))
    known = known_counts(store, last_files(store, job.spec.name))
    counts = known.take(pc.index_in(objects, value_set=known[OBJECT].combine_chunks()))
    left: dict[tuple[str, str], int] = {}
    for place, rows in zip(places, pc.add(counts["failed"], counts["skipped"]), strict=True):
        if rows.is_valid:
            left[place] = min(rows.as_py(), left.get(place, rows.as_py()))
    return left


def _is_asked_first(step: Step) -> bool:
    """Whether the step is a question to the model of the first reader."""
    return step.reader == 0 and step.by_model
