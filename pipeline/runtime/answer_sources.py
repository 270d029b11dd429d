"""Plans reuse: which label files of the output already answer texts of the shards with work.

Each shard takes over the answers in files of its own: to a smaller sample, or, in a retry, of the
rows that did not fail. A shard that was cut since the last snapshot, of a new, edited or moved
file, also takes those of the shards in that snapshot that have its texts. So a first run, and one
that resumes it, reads and compares no text before it labels.

Entry points: `stored_files` and `plan_reuse`. Must import neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain

import pyarrow.compute as pc

from pipeline.ledger.cells import Committed, Source, WorkItem, committed, equal_versions
from pipeline.ledger.counts_log import with_known_counts
from pipeline.ledger.snapshot_files import label_files_of
from pipeline.ledger.snapshots import known_counts, last_files
from pipeline.ledger.text_index import Hashes, KnownTexts, shards_with_texts
from pipeline.runtime.job import Job, Step
from pipeline.runtime.plan import Plan
from pipeline.stores.store import Store


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """The label files with answers to the steps of missing tasks, and who has use for them."""

    # By version: files of it, then of others with equal raw answers; none without an answer.
    by_version: Mapping[str, tuple[Committed, ...]]
    # Shards with work that the last snapshot did not show when the missing work was listed.
    new: frozenset[str]

    @property
    def sids(self) -> set[str]:
        """The shards with such a file."""
        files = chain.from_iterable(self.by_version.values())
        return {sid for done in files for etags in done.labels.values() for sid in etags}


def stored_files(job: Job, store: Store, planned: Plan) -> StoredFiles:
    """The files of the shards with work; if some are new, also of those in the last snapshot.

    It is the spec's last snapshot, or without one the current one.
    """
    published = last_files(store, job.spec.name)
    if published is None:
        published = last_files(store, None)
    shown = frozenset[str](() if published is None else published["sid"].unique().to_pylist())
    # — the documents of a shown shard are missing if another run has published it since the listing
    new = frozenset(
        work.shard.id
        for work in planned.work_items
        if shown and not work.retry and (work.documents or work.shard.id not in shown)
    )
    asking = {work.shard.id for work in planned.work_items}.union(shown if new else ())
    missing = {task for work in planned.work_items for task in work.tasks}
    by_version = {}
    for step in (step for step in job.steps if step.task in missing):
        fps = [step.fingerprint.id, *equal_versions(store, step.task, step.fingerprint)]
        files = (committed(store, {step.task: fp}, asking, documents={}) for fp in fps)
        if with_answers := tuple(done for done in files if done.labels[step.task]):
            by_version[step.version] = with_answers
    return StoredFiles(by_version, new if by_version else frozenset())


def plan_reuse(
    job: Job,
    store: Store,
    planned: Plan,
    stored: StoredFiles,
    texts: Iterable[tuple[str, Hashes]],
    *,
    keep: bool = True,
) -> Plan:
    """The plan, whose work items name the label files with answers to their texts.

    Args:
        job: The job.
        store: The output.
        planned: The plan.
        stored: Those of `stored_files`.
        texts: The hashes of the texts of new shards, where they are known: the others take over
            no answers of other shards.
        keep: Whether the output may be written; not in a dry run.
    """
    others = stored.sids - stored.new
    known = shards_with_texts(store, texts, others, keep=keep) if stored.new else {}
    left = _left_by_own_files(job, store, planned, stored)

    @cache  # — work items share what they take answers from
    def sources_of(task: str, version: str, sid: str) -> tuple[Source, ...]:
        files = (done.source(task, sid) for done in stored.by_version.get(version, ()))
        return tuple(source for source in files if source is not None)

    def with_sources(work: WorkItem) -> WorkItem:
        sid, rows = work.shard.id, work.asked_rows
        texts = known.get(sid, KnownTexts(rows))
        sources, asked = {}, [0]
        for step in (step for step in job.steps if step.task in work.tasks):
            of_step = partial(sources_of, step.task, step.version)
            own = () if work.documents else of_step(sid)
            others = {other: of_step(other) for other in texts.sources}
            if files := (*own, *chain.from_iterable(others.values())):
                sources[step.version] = files
            if _is_asked_first(step):
                answered = sum(texts.sources[other] for other, files in others.items() if files)
                left_by_own = left.get((sid, step.version), rows)
                asked.append(min(rows, texts.texts - answered, left_by_own))
        if not sources:
            return work
        return replace(work, sources=sources, rows_without_answer=max(asked))

    return replace(planned, work_items=tuple(map(with_sources, planned.work_items)))


def _left_by_own_files(
    job: Job, store: Store, planned: Plan, stored: StoredFiles
) -> dict[tuple[str, str], int]:
    """The most rows of a shard without an answer in its own files, where their counts are known.

    By shard and version, for the questions to the first model.
    """
    left: dict[tuple[str, str], int] = {}
    counts = known_counts(store, last_files(store, job.spec.name))
    for step in filter(_is_asked_first, job.steps):
        shards = [w.shard for w in planned.work_items if step.task in w.tasks and not w.documents]
        for done in stored.by_version.get(step.version, ()):
            files = with_known_counts(label_files_of(shards, done), counts)
            rows = pc.add(files["failed"], files["skipped"])
            for sid, count in zip(files["sid"].to_pylist(), rows.to_pylist(), strict=True):
                if count is not None:
                    left[sid, step.version] = min(count, left.get((sid, step.version), count))
    return left


def _is_asked_first(step: Step) -> bool:
    """Whether the step is a question to the model of the first reader."""
    return step.reader == 0 and step.by_model
