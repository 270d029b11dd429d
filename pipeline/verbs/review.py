"""A review: people label documents of a corpus on a page. Entry points: `open_review`, `reviewed`.

The documents are drawn at random and read once by the model, before the page opens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipeline.errors import Problem, SpecError, option_error
from pipeline.evaluation.gates import Gate, metrics_of, parse_gate
from pipeline.evaluation.intervals import Figure
from pipeline.filters.layout import refuse_own_places
from pipeline.gold.answers import answers_for, matching_snapshot
from pipeline.gold.labels import Gold, GoldCounts
from pipeline.gold.people import GoldFile
from pipeline.gold.values import GoldTask
from pipeline.options import AuditOptions
from pipeline.review.agreement import Agreement
from pipeline.review.choice import Floats, Order, features
from pipeline.review.options import ReviewOptions
from pipeline.review.refit import main_metric
from pipeline.review.session import Pool, Rules, Session
from pipeline.review.view import pairs
from pipeline.runtime.job import Job, make_job
from pipeline.runtime.placement import place, this_machine
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.store import open_store
from pipeline.verbs.audit_sample import sample_hashes
from pipeline.verbs.gold_states import read_gold_states
from pipeline.verbs.review_documents import (
    Document,
    documents_with,
    drawn_documents,
    of_another_corpus,
)

POOL = 2_000  # documents
TEXT_CHARS = 20_000  # of a text on the page
_LAYER = 1  # among the layers that are read: the states in its middle say most about the topic


@dataclass(frozen=True, slots=True)
class Reviewed:
    """The state of a gold file after a review. Also its JSON form."""

    task: str
    to: str
    documents: int  # that the review could show
    labels: int
    people: Mapping[str, Mapping[str, int]]  # by name, the current answers by action
    metric: str | None
    quality: Figure | None  # of the readout fitted last
    labels_pay: bool | None  # False: doubling the labels improved the readout no further
    agreements: tuple[Agreement, ...]
    agreed: int  # labels that the model gave, too, when the document was shown
    compared: int


@contextmanager
def open_review(
    spec: JobSpec,
    options: ReviewOptions,
    *,
    cache_dir: Path,
    announce: Callable[[int], Callable[[int], None]],
) -> Iterator[Session]:
    """The session of a task, with its gold file open until the end of the block.

    `announce` is called with the number of documents that the model will read, and returns a
    function that is called with the number of documents of each batch.

    Raises:
        SpecError: The spec has no such task, an option is wrong, or the gold file does not fit.
        StorageError: The input or the gold file cannot be read.
    """
    task = _task(spec, options.task)
    refuse_own_places(spec, options.to)
    rules = Rules(
        Order.parse(options.order),
        _until(task, options.until),
        options.blind,
        options.second,
        options.seed,
    )
    with GoldFile.open(options.to, task) as gold:
        bare = task.model_copy(update={"readout": None})
        alone = spec.model_copy(update={"tasks": (bare,)})
        job = make_job(alone, place(spec.model, this_machine()), cache_dir)
        labelled = {line.content_hash for line in gold.answers.values()}
        sample, drawn = None, set[str]()
        if rules.order.name == "audit":
            if rules.until is not None:
                fix = "no readout is fitted to a sample of an audit; leave it out"
                raise option_error("until", fix, options.until)
            audit = AuditOptions(documents=options.pool, seed=options.seed)
            sample, drawn = sample_hashes(spec, audit, cache_dir=cache_dir)
        gold.check_sample(sample)
        more = 0 if drawn else options.pool or POOL
        documents = _documents(spec, options, labelled | drawn, more, cache_dir)
        pool = _pool(job, bare, documents, options.seed, announce)
        if rules.order.name == "disagreement":
            pool = _with_ledger(pool, spec, task, cache_dir)
        if missing := len(drawn - {*pool.hashes}):
            fix = f"{missing:,} documents of the sample are not read whole as one piece, and "
            fix += "without them it would be another sample; use assay audit --to"
            raise option_error("order", fix, options.order)
        yield Session(replace(pool, sample=sample), task, gold, rules)


def reviewed(session: Session, options: ReviewOptions) -> Reviewed:
    """What the gold file has now, and how good a readout of it is."""
    people = session.counts()
    last = session.fits[-1] if session.fits else None
    return Reviewed(
        task=session.task.name,
        to=options.to,
        documents=len(session.pool),
        labels=sum(counts["label"] for counts in people.values()),
        people={name: dict(counts) for name, counts in people.items()},
        metric=None if last is None else last.metric,
        quality=None if last is None else last.quality,
        labels_pay=session.labels_pay,
        agreements=tuple(pairs(session)),
        agreed=sum(session.agreed.values()),
        compared=len(session.agreed),
    )


def _task(spec: JobSpec, name: str) -> TaskSpec:
    """The task; SpecError unless its documents are texts and a readout may answer it."""
    own = next((task for task in spec.tasks if task.name == name), None)
    if own is None:
        known = ", ".join(task.name for task in spec.tasks)
        raise option_error("task", f"the spec has no such task; it has {known}", name)
    if own not in spec.model_tasks:
        fix = "has a classifier or a cascade; a review fits a readout of the model's states"
        raise option_error("task", f"{fix}: name a task with a question or a readout", name)
    if spec.input.image is not None:
        fix = "a review shows texts, and the documents of this spec are images"
        raise SpecError([Problem("input.image", fix, spec.input.image)])
    return own


def _until(task: TaskSpec, written: str | None) -> Gate | None:
    if written is None:
        return None
    metrics, _ = metrics_of(task)
    fix = f"write METRIC >= NUMBER, as in '{main_metric(task)} >= .95', with a metric of the whole "
    wrong = option_error("until", f"{fix}task: {', '.join(metrics)}", written)
    try:
        gate = parse_gate(f"{task.name}.{written}", {task.name: task})
    except SpecError as error:
        raise wrong from error
    if gate.metric not in metrics or gate.task != task.name:
        raise wrong
    return gate


def _documents(
    spec: JobSpec, options: ReviewOptions, named: set[str], more: int, cache_dir: Path
) -> list[Document]:
    """Documents with different texts in random order: those of these hashes, and up to `more`."""
    own = documents_with(spec, named, seed=options.seed, cache_dir=cache_dir)
    if missing := len(named) - len(own):
        raise option_error("to", of_another_corpus(missing, len(named)), options.to)
    others = drawn_documents(spec, more, without=named, seed=options.seed, cache_dir=cache_dir)
    return sorted([*own.values(), *others])


def _pool(
    job: Job,
    task: TaskSpec,
    documents: Sequence[Document],
    seed: int,
    announce: Callable[[int], Callable[[int], None]],
) -> Pool:
    """The documents that the model can read whole, with their states."""
    every = GoldTask(tuple(task.labels), np.zeros(len(documents), np.int64))
    hashes, texts = (tuple(getattr(d, name) for d in documents) for name in ("hash", "text"))
    # — a row for each document, as gold is read; its labels do not count
    counts = GoldCounts(job.spec.input.path, "content_hash", len(documents))
    rows = Gold(counts, hashes, {task.name: every}, texts)
    question = None if task.kind == "multi" else task.question
    read = read_gold_states(job, rows, {task.name: question}, layers=None, announce=announce)
    own = read.kinds[task.name]
    middle = min(_LAYER, len(read.layers) - 1)
    chosen = [documents[row] for row in read.rows]
    return Pool(
        doc_ids=[document.doc_id for document in chosen],
        hashes=[document.hash for document in chosen],
        texts=[_shown(document.text) for document in chosen],
        states=read.states[:, :, own[0] : own[-1] + 1 : max(1, own[-1] - own[0])],
        features=features(np.asarray(read.states[:, middle, -1]), seed),
        groups=read.groups,
    )


def _shown(text: str) -> str:
    if len(text) <= TEXT_CHARS:
        return text
    return f"{text[:TEXT_CHARS]}\n[… {len(text) - TEXT_CHARS:,} more characters]"


def _with_ledger(pool: Pool, spec: JobSpec, task: TaskSpec, cache_dir: Path) -> Pool:
    """The pool with the answers of the output's last snapshot."""
    store = open_store(spec.output, spec.storage_options)
    snapshot, _ = matching_snapshot(spec, store, [task.name], cache_dir)
    parts = [part.name for part in task.parts]
    answers = answers_for(spec, snapshot, "content_hash", pool.hashes, parts)
    p: list[Floats] = [answers.tasks[name].p for name in parts]
    ledger = np.stack([own[:, 0] for own in p], axis=1) if task.kind == "multi" else p[0]
    return replace(pool, ledger=ledger)
