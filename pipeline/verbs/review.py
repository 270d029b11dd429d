"""A review: people label documents of a corpus on a page. Entry points: `open_review`, `reviewed`.

No model is loaded: the answers that the page may show are those that the output has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import Option, Problem, SpecError, option_error
from pipeline.filters.inputs import check_columns_of
from pipeline.filters.layout import refuse_own_places
from pipeline.filters.older_answers import warn_of_older_answers
from pipeline.gold.audits import DROP
from pipeline.gold.people import GoldFile
from pipeline.ledger.cuts import load_or_cut
from pipeline.ledger.snapshots import Contents, contents, last_snapshot
from pipeline.options import ReviewOptions
from pipeline.review.session import Pool, Session
from pipeline.review.view import Agreement, agreements
from pipeline.sources.shards import MAX_SHARD_BYTES
from pipeline.sources.source import find_objects
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.store import Store, open_store
from pipeline.verbs.review_documents import Answers, Read, Reading, accepted_by, drawn

POOL = 2_000  # documents
SMALL_BYTES = 16_000_000  # of a corpus of which all documents are read before the page opens


@dataclass(frozen=True, slots=True)
class Reviewed:
    """The state of a gold file after a review. Also its JSON form."""

    task: str
    to: str
    documents: int  # that the review could show
    labels: int
    by_label: Mapping[str, int]
    people: Mapping[str, Mapping[str, int]]  # by name, the current answers by action
    agreements: tuple[Agreement, ...]


@contextmanager
def open_review(spec: JobSpec, options: ReviewOptions, *, cache_dir: Path) -> Iterator[Session]:
    """The session of a task or an audit, with its gold file open until the end of the block.

    The block begins when some documents are read. The others are read meanwhile.

    Raises:
        SpecError: The spec has no such task, an option is wrong, or the gold file does not fit.
        StorageError: The input, the output or the gold file cannot be read.
    """
    task = _task(spec, options)
    refuse_own_places(spec, options.to)
    with GoldFile.open(options.to, task) as gold:
        pool = Pool()
        if options.order == "audit":
            from pipeline.verbs.audit import (
                draw_sample,  # — scipy: other reviews do not wait for it
            )

            for document in draw_sample(spec, options, cache_dir=cache_dir):
                pool.add(document)
            gold.check_sample(pool.sample)
            yield Session(pool, task, gold, options)
            return
        gold.check_sample(None)
        with closing(_reading(spec, task, options, pool, gold, cache_dir)):
            yield Session(pool, task, gold, options)
        if pool.error is not None:
            raise pool.error


def reviewed(session: Session) -> Reviewed:
    """What the gold file has now."""
    people = session.counts()
    return Reviewed(
        task=session.task.name,
        to=session.options.to,
        documents=len(session.pool),
        labels=sum(counts["label"] for counts in people.values()),
        by_label=session.by_label(),
        people={name: dict(counts) for name, counts in people.items()},
        agreements=tuple(agreements(session)),
    )


def _task(spec: JobSpec, options: ReviewOptions) -> TaskSpec:
    """The task that people label; SpecError if there is none, or documents are images."""
    if spec.input.image is not None:
        fix = "a review shows texts, and the documents of this spec are images"
        raise SpecError([Problem("input.image", fix, spec.input.image)])
    if options.order == "audit":
        return DROP
    tasks, name = {task.name: task for task in spec.tasks}, options.task
    if name is None and len(tasks) == 1:
        return spec.tasks[0]
    if name not in tasks:
        fix = "missing; write one" if name is None else "the spec has no such task; it has"
        raise option_error("task", f"{fix}{' of' * (name is None)} {', '.join(tasks)}", name)
    return tasks[name]


def _reading(
    spec: JobSpec,
    task: TaskSpec,
    options: ReviewOptions,
    pool: Pool,
    gold: GoldFile,
    cache_dir: Path,
) -> Reading:
    """The thread that reads documents into the pool, which has some when this returns."""
    store, source = open_store(spec.output, spec.storage_options), spec.input
    objects = find_objects(source.path, cache_dir, source.storage_options, output=store.url)
    shards = load_or_cut(store, objects, source.columns, MAX_SHARD_BYTES, keep=False).shards
    check_columns_of(shards, source.storage_options, options.columns, place=Option("columns"))
    labelled = {line.content_hash for line in gold.answers.values()}
    most = options.documents or POOL
    if options.where is not None:
        draws = accepted_by(options.where, spec, most, options.seed, cache_dir=cache_dir)
    else:
        draws = drawn(shards, most, options.seed)
    answered = _answered(spec, store, task)
    if answered is not None:
        warn_of_older_answers(spec, store, answered, cache_dir)
        pool.fp = answered.tasks[task.name].fp
    answers = Answers(store, answered, task)
    # — a condition chooses other documents than those of the file, which then are not looked for
    other_shards, named = (shards, labelled) if options.where is None else ((), set[str]())
    read = Read(answers, options.columns, source.storage_options)
    reading = Reading(pool, draws, other_shards, named, read)
    reading.wait(for_all=sum(shard.piece.text_bytes for shard in shards) <= SMALL_BYTES)
    if pool.error is not None:
        raise pool.error
    if not len(pool):
        fix = "no document that was drawn has a text; name another column, or other files"
        raise SpecError([Problem("input.path", fix, source.path)])
    return reading


def _answered(spec: JobSpec, store: Store, task: TaskSpec) -> Contents | None:
    """The last snapshot, if it has answers to the task with its labels."""
    if (number := last_snapshot(store, spec.name)) is None:
        return None
    snapshot = contents(store, number)
    own = snapshot.tasks.get(task.name)
    return snapshot if own is not None and own.labels == tuple(task.labels) else None
