"""Chooses the thresholds of a cascade from a sample that every stage answers.

Entry point: `choose_thresholds`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import SpecError, StorageError, option_error
from pipeline.evaluation.cascade_guarantee import CONFIDENCE, Promise, choose
from pipeline.fitted.cascade_file import Thresholds, parse_thresholds
from pipeline.gold.fitted_texts import LEAST_ROWS, readout_texts
from pipeline.ledger.columns import probabilities
from pipeline.ledger.rows import aligned_batches, wide_schema
from pipeline.options import FitOptions, RunOptions
from pipeline.runtime.fitted_files import options_for
from pipeline.runtime.job import in_format, job_of_output, reader_specs
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.placement import place, this_machine
from pipeline.runtime.plan import plan
from pipeline.runtime.progress import Progress, ignore
from pipeline.runtime.run import label
from pipeline.sources.documents import SKIPPED
from pipeline.sources.shards import fields_of
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import CascadeTask
from pipeline.stores.named_files import Target, new_file
from pipeline.stores.store import open_store
from pipeline.verbs import ForPeople

DOCUMENTS = 500
Floats = NDArray[np.float64]
Announce = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class StageAnswers:
    """What all stages answered about some documents, whose texts differ."""

    fp: tuple[str, ...]  # of each stage
    p: Floats  # [stages, docs, labels]
    hashes: tuple[str, ...]  # [docs]: of the contents
    fitted: int  # other documents, which a readout of a stage was fitted to
    is_whole: bool  # whether it is the whole input


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenThresholds(Thresholds):
    """The thresholds of a cascade, and what they do to the sample. Also the JSON form."""

    path: str
    decided: tuple[int, ...]  # documents of the sample, by the stage that decides
    # Documents that were left out, because a readout was fitted to them.
    fitted: ForPeople[int]


def choose_thresholds(
    spec: JobSpec,
    options: FitOptions,
    *,
    cache_dir: Path,
    announce: Announce = ignore,
) -> ChosenThresholds:
    """Writes the thresholds of a task's cascade where the spec says.

    Every stage answers the whole sample. The answers are cells of the output: a run, or another
    choice, does not ask for them again. Texts that a readout of a stage was fitted to prove
    nothing, so they are left out. A sample has the texts of each smaller one, so another choice
    for the same stages is another look at them, and the confidence that it states is lower.

    Raises:
        SpecError: The task has no cascade, the file exists, or the sample is too small.
        StorageError: Some documents of the sample could not be labelled; run again.
    """
    assert options.recall is not None and options.precision is not None, options
    cascade = _cascade(spec, options.tasks)
    path, labels = cascade.cascade.file, tuple(cascade.labels)
    target = new_file(path, options_for(path, spec), overwrite=options.overwrite)
    promise = Promise(options.recall, options.precision)
    sample = _sample(spec, cascade, options.documents or DOCUMENTS, cache_dir, announce)
    # — not the rarer one of the sample: the promise may not depend on what it is proved with
    positive = cascade.name if cascade.name in labels else labels[0]
    of_label = labels.index(positive)
    truth = sample.p[-1].argmax(axis=1) == of_label
    _check_size(sample, int(truth.sum()), positive, promise, options)
    source: dict[str, object] = {
        **asdict(promise),
        "documents": len(truth),
        "positives": int(truth.sum()),
        "texts": sorted(sample.hashes),
    }
    looks = _looks(target, cascade.name, sample.fp, source)
    source |= {"looks": looks, "confidence": max(0.0, 1 - looks * (1 - CONFIDENCE))}
    chosen = choose(sample.p[:-1, :, of_label], truth, promise)
    file = Thresholds(cascade.name, (labels[0], labels[1]), positive, sample.fp, *chosen, source)
    target.write(file.json())
    decided = np.array([file.decides(p) for p in sample.p[:-1]] + [np.ones(len(truth))])
    counts = np.bincount(decided.argmax(axis=0), minlength=len(sample.p)).tolist()
    return ChosenThresholds(
        **fields_of(file), path=path, decided=tuple(counts), fitted=sample.fitted
    )


def _cascade(spec: JobSpec, tasks: Sequence[str]) -> CascadeTask:
    """The task with the cascade; SpecError unless one is named, or the only one."""
    cascades = {task.name: task for task in spec.cascades}
    wanted = tasks or [*cascades]
    if len(wanted) != 1 or wanted[0] not in cascades:
        fix = f"name one task with a cascade; the spec has {', '.join(cascades) or 'none'}"
        raise option_error("tasks", fix, wanted)
    return cascades[wanted[0]]


def _check_size(
    sample: StageAnswers, positives: int, positive: str, promise: Promise, options: FitOptions
) -> None:
    """SpecError if the sample has too few positive documents for the promise."""
    if positives >= promise.positives_needed:
        return
    texts = len(sample.hashes)
    fix = f"only {positives} of {texts} sampled texts are {positive}; this guarantee "
    fix += f"needs {promise.positives_needed}: "
    needed = ceil(promise.positives_needed * texts / max(positives, 1))
    lower = "lower --recall and --precision"
    enough = lower if sample.is_whole else f"write --documents {needed}, or {lower}"
    raise option_error("documents", fix + enough, options.documents)


def _looks(target: Target, task: str, stages: tuple[str, ...], source: Mapping[str, object]) -> int:
    """How many choices for these stages there were with this one; a repeated one is none."""
    try:
        before = parse_thresholds(target.read() if target.exists() else b"{}")
    except ValueError:  # — there is none, or a file that no run can read
        return 1
    if (before.task, before.stages) != (task, stages):
        return 1
    looks = int(before.source["looks"])
    return looks if source.items() <= before.source.items() else looks + 1


def _sample(
    spec: JobSpec, task: CascadeTask, documents: int, cache_dir: Path, announce: Announce
) -> StageAnswers:
    """Labels the sample with every stage; texts that a stage cannot answer are left out."""
    by_stage, is_whole = _labelled(spec, task, documents, cache_dir, announce)
    # — of a stage that has labelled the whole input, these are more than the sample's
    smallest = min((answers for _, answers in by_stage), key=len)
    hashes = np.unique(smallest["content_hash"].to_pylist())  # equal texts are one trial
    p = np.stack([_probabilities(answers, hashes, task) for _, answers in by_stage])
    usable = ~np.isnan(p).any(axis=(0, 2))
    seen = usable & np.isin(hashes, list(readout_texts(spec, task)))
    usable &= ~seen
    if usable.sum() < (LEAST_ROWS if seen.any() else 1):
        fix = f"{usable.sum():,} different texts of it have an answer of every stage"
        if seen.any():
            fix += f", beside {seen.sum():,} that a readout was fitted to; {LEAST_ROWS} are needed"
        raise option_error("documents", fix, documents)
    return StageAnswers(
        fp=tuple(fp for fp, _ in by_stage),
        p=p[:, usable],
        hashes=tuple(hashes[usable].tolist()),
        fitted=int(seen.sum()),
        is_whole=is_whole,
    )


def _probabilities(answers: pa.Table, hashes: NDArray[np.str_], task: CascadeTask) -> Floats:
    """[docs, labels] of the texts with these hashes."""
    value_set = answers["content_hash"].combine_chunks()
    rows = pc.index_in(pa.array(hashes.tolist(), value_set.type), value_set=value_set)
    return probabilities(answers[task.name].combine_chunks().take(rows), list(task.labels))


def _labelled(
    spec: JobSpec, task: CascadeTask, documents: int, cache_dir: Path, announce: Announce
) -> tuple[list[tuple[str, pa.Table]], bool]:
    """The fingerprint of each stage, and its answers; and whether they are of all texts."""
    dtype = place(spec.model, this_machine()).dtype
    alone = spec.model_copy(update={"tasks": (task,)})
    stages = [in_format(own, dtype) for own, _ in reader_specs(alone)]
    by_stage: list[tuple[str, pa.Table]] = []
    share: str | None = None
    # — the last first: a run cuts new input into shards for its largest model
    for number, stage in reversed([*enumerate(stages)]):
        with _placed(spec, task, number):
            if not by_stage:
                store = open_store(spec.output, spec.storage_options)
                rows = plan(job_of_output(stage, store, cache_dir), store, keep=False).rows
                share = f"{documents / rows:.9f}" if documents < rows else None
            with label(
                stage, cache_dir=cache_dir, options=RunOptions(sample=share), announce=announce
            ) as labelled:
                if labelled.plan.work_items:
                    left = f"{labelled.plan.missing_rows:,} documents are left; run again"
                    raise StorageError(left)
                answers = _answers(labelled, task.name)
            by_stage.insert(0, (labelled.job.fingerprints[task.name].raw.id, answers))
    return by_stage, share is None


@contextmanager
def _placed(spec: JobSpec, task: CascadeTask, number: int) -> Iterator[None]:
    """A SpecError about the task of a stage's own spec names the stage's place in the spec."""
    try:
        yield
    except SpecError as error:
        stage = f"tasks.{spec.tasks.index(task)}.cascade.stages.{number}"
        raise SpecError(
            [
                replace(problem, place=re.sub(r"^tasks\.0\b", stage, problem.place))
                for problem in error.problems
            ]
        ) from error


def _answers(labelled: Outcome, task: str) -> pa.Table:
    """The content hashes and the answers of the sample."""
    wide = wide_schema(labelled.contents, [task])
    schema = pa.schema([wide.field(name) for name in ("content_hash", task)])
    rows = pa.Table.from_batches(aligned_batches(labelled.store, labelled.contents, schema), schema)
    return rows.filter(pc.not_equal(pc.struct_field(rows[task], "status"), SKIPPED))
