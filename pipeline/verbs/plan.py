"""The plan of a dry run, with how long it takes and what it costs. Entry point: `estimate`.

The time of a few documents is measured here and extrapolated to all that are missing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import computed_field

from pipeline.errors import Option, Problem, SpecError, option_error
from pipeline.inference.engine import DocumentIds, Engine
from pipeline.inference.memory import disable_malloc_trim
from pipeline.inference.shard_answers import ShardAnswers
from pipeline.options import PlanOptions
from pipeline.runtime.assembly import DocumentReader, reader_engine, reader_prompt
from pipeline.runtime.dry_run import dry_run
from pipeline.runtime.job import make_reader
from pipeline.runtime.placement import engine_bytes, place, spread, this_machine
from pipeline.runtime.plan import Plan, PlanCounts
from pipeline.runtime.progress import (
    LISTING,
    LOADING,
    MEASURING,
    Send,
    WorkerReport,
    ignore,
)
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.verbs import ForPeople
from pipeline.verbs.samples import take_samples

# A batch on a CPU has one or two documents, a batch on a GPU 65,536 tokens.
DEFAULT_DOCUMENTS = {"cpu": 8, "cuda": 256}

Tasks = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Documents for which the same tasks are missing."""

    tasks: Tasks
    documents: int  # an upper bound: of an edited file, the model reads only new documents
    seconds_per_document: float  # on one worker


@dataclass(frozen=True, slots=True)
class Measured:
    """How the seconds were measured."""

    documents: int
    tokens_per_document: float
    device: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate(PlanCounts):
    """A plan, and the time that labelling takes, without the start of the workers."""

    plan: ForPeople[Plan]
    parts: tuple[Part, ...]  # the largest first
    measured: Measured | None  # None if a rate was given, or no document needs the model
    workers: int
    price: float | None

    @computed_field
    @property
    def documents_for_model(self) -> int:
        """Upper bound of the documents that the model reads."""
        return sum(part.documents for part in self.parts)

    @computed_field
    @property
    def worker_seconds(self) -> float:
        return sum(part.documents * part.seconds_per_document for part in self.parts)

    @computed_field
    @property
    def seconds(self) -> float:
        """The duration, if all workers have work until the end."""
        return self.worker_seconds / self.workers

    @computed_field
    @property
    def cost(self) -> float | None:
        return None if self.price is None else self.worker_seconds / 3600 * self.price


def estimate(
    spec: JobSpec, options: PlanOptions, *, cache_dir: Path, announce: Send = ignore
) -> RunEstimate:
    """The plan of a run and its time; writes nothing.

    The model is loaded only if documents are missing and no rate is given. SpecError as in a run.
    """
    announce(WorkerReport(LISTING))
    planned = dry_run(spec, options, cache_dir=cache_dir)
    # For each set of tasks that needs the model: the number of documents that miss it.
    missing: Counter[Tasks] = Counter()
    by_model = [task.name for task in spec.tasks if task.classifier is None]
    for work in planned.work_items:
        if rows := min(work.asked_rows, planned.rows_of(work)):
            missing[tuple(task for task in work.tasks if task in by_model)] += rows
    measured: Measured | None = None
    if options.rate is not None:
        seconds = dict.fromkeys(missing, 1 / options.rate)
    elif staged := [t.name for t in spec.cascades if any(t.name in tasks for tasks in missing)]:
        fix = f"the time of the cascade of {staged[0]} is not measured; give the documents a second"
        raise option_error("rate", f"{fix} of one worker", None)
    elif missing:
        measured, seconds = _measure(spec, planned, missing, options, cache_dir, announce)
    parts = tuple(
        Part(tasks, documents, seconds[tasks]) for tasks, documents in missing.most_common()
    )
    return RunEstimate(
        **asdict(planned.counts),
        plan=planned,
        parts=parts,
        measured=measured,
        workers=options.workers,
        price=options.price,
    )


def _measure(
    spec: JobSpec,
    planned: Plan,
    missing: Iterable[Tasks],
    options: PlanOptions,
    cache_dir: Path,
    announce: Send,
) -> tuple[Measured, dict[Tasks, float]]:
    """Seconds per document for each set of tasks, on one worker of this machine.

    On a CPU, one engine is measured with as many threads as each engine of a run has, and a worker
    is the machine with all of them.
    """
    machine = this_machine()
    try:
        placement = place(spec.model, machine)
    except SpecError as error:
        fix = "or give the documents a second of one worker; the summary of a run shows them"
        raise SpecError([*error.problems, Problem(Option("rate"), fix, None)]) from error
    disable_malloc_trim()
    own = make_reader(spec, placement, cache_dir)
    folder, tokenizer, _ = reader_prompt(own, send=announce)
    if not placement.gpus:
        needs = engine_bytes(spec, own.files, placement.dtype)
        items = len(planned.work_items)
        placement = spread(placement, spec.model, machine, work_items=items, needs=needs)
    own = replace(own, placement=placement)
    count = options.documents or DEFAULT_DOCUMENTS[placement.device]
    shards = [work.shard for work in planned.work_items if work.asked_rows]
    reader = DocumentReader.of(own, folder, tokenizer)
    pieces = [sample.pieces for sample in take_samples(shards, reader, spec, count)]
    announce(WorkerReport(LOADING))
    engine = reader_engine(own)
    announce(WorkerReport(MEASURING))
    seconds = {
        tasks: _seconds(
            engine,
            pieces,
            [part for task in spec.tasks if task.name in tasks for part in task.parts],
        )
        for tasks in missing
    }
    tokens = sum(len(piece) for document in pieces for piece in document)
    measured = Measured(len(pieces), tokens / len(pieces), placement.device, placement.dtype)
    documents = len(pieces) * (placement.actors // placement.workers)  # of all engines of a worker
    return measured, {tasks: whole / documents for tasks, whole in seconds.items()}


def _seconds(
    engine: Engine, pieces: Sequence[Sequence[DocumentIds]], tasks: Sequence[TaskSpec]
) -> float:
    # The first forward is slower than the others.
    ShardAnswers(pieces[:1], tasks).label_rows(engine, 0, 1)
    answers = ShardAnswers(pieces, tasks)
    started = time.perf_counter()
    answers.label_rows(engine, 0, len(pieces))
    return time.perf_counter() - started
