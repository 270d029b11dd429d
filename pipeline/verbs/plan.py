"""What a run would compute, how long it would take and what it would cost, before it does.

Knows how to count, and how to extrapolate from a few documents. Knows nothing of Ray or of how a
plan is shown.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.errors import Problem, SpecError
from pipeline.inference.engine import DocumentIds, LabelEngine
from pipeline.inference.memory import disable_malloc_trim
from pipeline.inference.model.quantisation import require_torchao
from pipeline.inference.shard_answers import ShardAnswers
from pipeline.ledger.cells import WorkItem
from pipeline.options import PlanOptions
from pipeline.runtime.assembly import job_model, job_prompt, job_readouts, label_engine
from pipeline.runtime.job import Plan, make_job
from pipeline.runtime.placement import Placement, place, this_machine
from pipeline.runtime.run import dry_run
from pipeline.sources.shards import Shard
from pipeline.spec.schema import JobSpec, TaskSpec
from pipeline.verbs.samples import take_samples

# Batches of a CPU hold a document or two, those of a GPU 65,536 tokens.
DEFAULT_DOCUMENTS = {"cpu": 8, "cuda": 256}

Tasks = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Documents that miss the same tasks."""

    tasks: Tasks
    documents: int  # at most: of an edited file the model reads what is new
    seconds_per_document: float  # of one worker


@dataclass(frozen=True, slots=True)
class Measured:
    """What the seconds were measured on."""

    documents: int
    tokens_per_document: float
    device: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """A plan, and what it takes: the labelling alone, without the start of the workers."""

    plan: Plan
    parts: tuple[Part, ...]  # the largest first
    measured: Measured | None  # None: the rate was given, or no model is needed
    workers: int
    price: float | None

    @property
    def documents(self) -> int:
        """How many documents the model reads, at most."""
        return sum(part.documents for part in self.parts)

    @property
    def worker_seconds(self) -> float:
        return sum(part.documents * part.seconds_per_document for part in self.parts)

    @property
    def seconds(self) -> float:
        """How long, if all workers have work until the end."""
        return self.worker_seconds / self.workers

    @property
    def cost(self) -> float | None:
        return None if self.price is None else self.worker_seconds / 3600 * self.price


def estimate(spec: JobSpec, wishes: PlanOptions, *, cache_dir: Path) -> Estimate:
    """The plan of a run, and its time; nothing is written.

    The model is loaded only where documents are missing and no rate was given. SpecError for what
    a run would refuse, too.
    """
    planned = dry_run(spec, cache_dir=cache_dir)
    missing = _missing(planned.work_items)
    measured: Measured | None = None
    if wishes.rate is not None:
        seconds = dict.fromkeys(missing, 1 / wishes.rate)
    elif missing:
        shards = [work.shard for work in planned.work_items if work.asks]
        measured, seconds = _measure(spec, missing, shards, wishes.documents, cache_dir=cache_dir)
    parts = tuple(
        Part(tasks, documents, seconds[tasks]) for tasks, documents in missing.most_common()
    )
    return Estimate(planned, parts, measured, wishes.workers, wishes.price)


def _missing(work_items: Iterable[WorkItem]) -> Counter[Tasks]:
    """How many documents each set of tasks is missing of, where it takes the model."""
    missing: Counter[Tasks] = Counter()
    for work in work_items:
        if work.asks:
            missing[work.tasks] += work.shard.rows
    return missing


def _measure(
    spec: JobSpec,
    missing: Iterable[Tasks],
    shards: Sequence[Shard],
    documents: int | None,
    *,
    cache_dir: Path,
) -> tuple[Measured, dict[Tasks, float]]:
    """Seconds a document for each set of tasks, of one worker on this machine."""
    require_torchao(spec.model.quantize)
    placement = _here(spec)
    torch.set_num_threads(placement.threads)
    disable_malloc_trim()
    job = make_job(spec, placement, cache_dir)
    folder, tokenizer, prompt = job_prompt(job)
    wanted = documents or DEFAULT_DOCUMENTS[placement.device]
    pieces = [sample.pieces for sample in take_samples(shards, tokenizer, spec, wanted)]
    engine = label_engine(job, job_model(job, folder), prompt, job_readouts(job))
    seconds = {
        tasks: _seconds(engine, pieces, [task for task in spec.tasks if task.name in tasks])
        for tasks in missing
    }
    tokens = sum(len(piece) for document in pieces for piece in document)
    measured = Measured(len(pieces), tokens / len(pieces), placement.device, placement.dtype)
    return measured, {tasks: whole / len(pieces) for tasks, whole in seconds.items()}


def _here(spec: JobSpec) -> Placement:
    try:
        return place(spec.model, this_machine())
    except SpecError as error:
        fix = "or give a worker's documents a second, which a run's summary shows"
        raise SpecError([*error.problems, Problem("--rate", fix, None)]) from error


def _seconds(
    engine: LabelEngine, pieces: Sequence[Sequence[DocumentIds]], tasks: Sequence[TaskSpec]
) -> float:
    ShardAnswers(pieces[:1], tasks).label_rows(
        engine, 0, 1
    )  # the first forward is slower than the others
    answers = ShardAnswers(pieces, tasks)
    started = time.perf_counter()
    answers.label_rows(engine, 0, len(pieces))
    return time.perf_counter() - started
