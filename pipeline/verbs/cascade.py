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
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import Option, Problem, SpecError, StorageError, option_error
from pipeline.evaluation.cascade_guarantee import Promise, choose
from pipeline.fitted.cascade_file import Thresholds
from pipeline.gold.fitted_texts import LEAST_ROWS, readout_texts
from pipeline.gold.labels import Gold, gold_hash, read_gold
from pipeline.gold.values import UNLABELLED
from pipeline.ledger.columns import probabilities
from pipeline.ledger.rows import aligned_batches, wide_schema
from pipeline.options import CascadeOptions, RunOptions
from pipeline.runtime.fitted_files import options_for
from pipeline.runtime.job import in_format, job_of_output, reader_specs
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.placement import place, this_machine
from pipeline.runtime.plan import plan
from pipeline.runtime.progress import Progress, ignore
from pipeline.runtime.run import label
from pipeline.sources.documents import SKIPPED
from pipeline.sources.id_text import spellings
from pipeline.sources.shards import fields_of
from pipeline.spec.schema import JobSpec
from pipeline.stores.named_files import new_file
from pipeline.stores.store import open_store
from pipeline.verbs import ForPeople

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageAnswers:
    """What all stages answered about some documents, whose texts differ."""

    fp: tuple[str, ...]  # of each stage
    p: Floats  # [stages, docs, labels]
    truth: NDArray[np.int64]  # [docs]: the index of a label, of the last stage or of gold
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
    # Of the cascade; None: no document is positive, or answered so.
    in_sample: Mapping[Literal["recall", "precision"], float | None]


def choose_thresholds(
    spec: JobSpec,
    options: CascadeOptions,
    *,
    cache_dir: Path,
    announce: Callable[[Progress], None] = ignore,
) -> ChosenThresholds:
    """Writes the thresholds of a task's cascade at `options.to`.

    Every stage answers the whole sample. The answers are cells of the output: a run, or another
    choice, does not ask for them again. Texts that a readout of a stage was fitted to prove
    nothing, so they are left out.

    Raises:
        SpecError: The task has no cascade, the file exists, or the sample is too small.
        StorageError: Some documents of the sample could not be labelled; run again.
    """
    name, labels, stages = _stages(spec, options)
    target = new_file(options.to, options_for(options.to, spec), overwrite=options.overwrite)
    gold = None
    if options.gold is not None:
        gold = _random_gold(options.gold, spec, name)
    promise = Promise(options.recall, options.precision, options.confidence)
    sample = _sample(spec, options, stages, gold, cache_dir, announce)
    # — not the rarer one of the sample: the promise may not depend on what it is proved with
    positive = options.positive or (name if name in labels else labels[0])
    of_label = labels.index(positive)
    scores = sample.p[:-1, :, of_label]
    truth, last = sample.truth == of_label, sample.p[-1].argmax(axis=1) == of_label
    positives = int(truth.sum())
    if positives < promise.positives_needed:
        fix = f"only {positives} of {len(truth)} sampled texts are {positive}; this guarantee "
        fix += f"needs {promise.positives_needed}: "
        needed = ceil(promise.positives_needed * len(truth) / max(positives, 1))
        lower = "lower --recall and --precision"
        enough = lower if sample.is_whole else f"write --documents {needed}, or {lower}"
        raise option_error("documents", fix + enough, options.documents)
    chosen = choose(scores, last, truth, promise)
    if chosen is None:
        right = (last & truth).sum()
        fix = f"the last stage alone has recall {right / positives:.3f} and precision "
        fix += f"{right / max(last.sum(), 1):.3f}, too close to these to prove them with this "
        fix += "sample; lower them, or enlarge the sample"
        promised = f"recall {promise.recall:g}, precision {promise.precision:g}"
        raise SpecError([Problem(Option("recall", "precision"), fix, promised)])
    source: dict[str, object] = {
        **asdict(promise),
        "documents": len(truth),
        "positives": positives,
        "truth": "the last stage" if gold is None else "gold labels",
    }
    source |= {} if gold is None else {"gold": gold_hash(gold, name)}
    source |= {"texts": sorted(set(sample.hashes))}
    file = Thresholds(name, labels, positive, sample.fp, *chosen, source)
    target.write(file.json())
    return _effect(options.to, file, sample, of_label)


def _random_gold(source: str, spec: JobSpec, task: str) -> Gold:
    """The gold of the task; SpecError if its documents were not drawn with equal chances."""
    gold = read_gold(source, spec, (task,))
    if gold.kind(task) == "chosen":
        fix = "its documents were not drawn with equal chances (a review chose them), so they "
        fix += "prove nothing about the corpus; give gold of documents drawn at random "
        fix += "(assay review --by random), or leave --gold out"
        raise option_error("gold", fix, source)
    return gold


def _effect(path: str, file: Thresholds, sample: StageAnswers, of_label: int) -> ChosenThresholds:
    decided = np.array([file.decides(p) for p in sample.p[:-1]] + [np.ones(len(sample.truth))])
    by = decided.argmax(axis=0)  # [docs]: the first stage that decides
    answers = sample.p[by, np.arange(len(by))].argmax(axis=1) == of_label
    truth = sample.truth == of_label
    right = float((answers & truth).sum())
    counts = np.bincount(by, minlength=len(sample.p)).tolist()
    positives, answered = int(truth.sum()), int(answers.sum())
    return ChosenThresholds(
        **fields_of(file),
        path=path,
        decided=tuple(counts),
        fitted=sample.fitted,
        in_sample={
            "recall": right / positives if positives else None,
            "precision": right / answered if answered else None,
        },
    )


def _stages(spec: JobSpec, options: CascadeOptions) -> tuple[str, tuple[str, str], list[JobSpec]]:
    """The task's name and labels, and a spec for each stage; SpecError if it has no cascade."""
    named = {task.name: task for task in spec.cascades}
    if options.task not in named:
        fix = f"the spec has no such task with a cascade; it has {', '.join(named) or 'none'}"
        raise option_error("task", fix, options.task)
    task = named[options.task]
    first, second = task.labels
    if options.positive not in (None, first, second):
        fix = f"the task has no such label; it has {first}, {second}"
        raise option_error("positive", fix, options.positive)
    alone = spec.model_copy(update={"tasks": (task,)})
    dtype = place(spec.model, this_machine()).dtype
    return task.name, (first, second), [in_format(own, dtype) for own, _ in reader_specs(alone)]


def _sample(
    spec: JobSpec,
    options: CascadeOptions,
    stages: Sequence[JobSpec],
    gold: Gold | None,
    cache_dir: Path,
    announce: Callable[[Progress], None],
) -> StageAnswers:
    """Labels the sample with every stage; texts that a stage cannot answer are left out."""
    by_stage, is_whole = _labelled(spec, options, stages, cache_dir, announce)
    # — of a stage that has labelled the whole input, these are more than the sample's
    documents = min((documents for _, _, documents in by_stage), key=len)
    _, firsts = np.unique(documents.column("content_hash").to_pylist(), return_index=True)
    documents = documents.take(pa.array(firsts))  # equal texts are in a sample together: one trial
    hashes = documents.column("content_hash").combine_chunks()
    labels = list(stages[0].tasks[0].labels)
    p = np.stack(
        [
            probabilities(answers.take(_places(hashes, of_stage)), labels)
            for _, answers, of_stage in by_stage
        ]
    )
    usable = ~np.isnan(p).any(axis=(0, 2))
    truth = p[-1].argmax(axis=1)
    if gold is not None:
        by_key = dict(zip(gold.keys, gold.tasks[options.task].truth.tolist(), strict=True))
        key_of, ids = spellings(gold.keys), documents.column(gold.counts.joined_by).to_pylist()
        truth = np.array([by_key.get(key_of.get(own, own), UNLABELLED) for own in ids])
        usable &= truth != UNLABELLED
    seen = usable & np.isin(hashes.to_pylist(), list(_fitted(spec, options.task)))
    usable &= ~seen
    if usable.sum() < (LEAST_ROWS if seen.any() else 1):
        needed = "have an answer of every stage" + (" and a gold label" if gold else "")
        fix = f"{usable.sum():,} different texts of it {needed}"
        if seen.any():
            fix += f", beside {seen.sum():,} that a readout was fitted to; {LEAST_ROWS} are needed"
        raise option_error("documents", fix, options.documents)
    return StageAnswers(
        fp=tuple(own for own, _, _ in by_stage),
        p=p[:, usable],
        truth=truth[usable],
        hashes=tuple(hashes.filter(pa.array(usable)).to_pylist()),
        fitted=int(seen.sum()),
        is_whole=is_whole,
    )


def _labelled(
    spec: JobSpec,
    options: CascadeOptions,
    stages: Sequence[JobSpec],
    cache_dir: Path,
    announce: Callable[[Progress], None],
) -> tuple[list[tuple[str, pa.StructArray, pa.Table]], bool]:
    """The fingerprint of each stage, its answers and their documents; if they are of all texts."""
    by_stage: list[tuple[str, pa.StructArray, pa.Table]] = []
    share: str | None = None
    # — the last first: a run cuts new input into shards for its largest model
    for number, stage in reversed([*enumerate(stages)]):
        with _placed(spec, options.task, number):
            if not by_stage:
                store = open_store(spec.output, spec.storage_options)
                rows = plan(job_of_output(stage, store, cache_dir), store, keep=False).rows
                share = f"{options.documents / rows:.9f}" if options.documents < rows else None
            with label(
                stage, cache_dir=cache_dir, options=RunOptions(sample=share), announce=announce
            ) as labelled:
                if labelled.plan.work_items:
                    left = f"{labelled.plan.missing_rows:,} documents are left; run again"
                    raise StorageError(left)
                answers = _answers(labelled, options.task)
            raw = labelled.job.fingerprints[options.task].raw
            by_stage.insert(0, (raw.id, *answers))
    return by_stage, share is None


@contextmanager
def _placed(spec: JobSpec, task: str, number: int) -> Iterator[None]:
    """A SpecError about the task of a stage's own spec names the stage's place in the spec."""
    try:
        yield
    except SpecError as error:
        [index] = [place for place, own in enumerate(spec.tasks) if own.name == task]
        stage = f"tasks.{index}.cascade.stages.{number}"
        raise SpecError(
            [
                replace(problem, place=re.sub(r"^tasks\.0\b", stage, problem.place))
                for problem in error.problems
            ]
        ) from error


def _fitted(spec: JobSpec, name: str) -> frozenset[str]:
    """The content hashes that the readouts of the task's stages were fitted to."""
    return readout_texts(spec, next(task for task in spec.tasks if task.name == name))


def _answers(labelled: Outcome, task: str) -> tuple[pa.StructArray, pa.Table]:
    """The answers of the sample in the order of the shards, and the documents."""
    wide = wide_schema(labelled.contents, [task])
    schema = pa.schema([wide.field(name) for name in ("doc_id", "content_hash", task)])
    rows = pa.Table.from_batches(aligned_batches(labelled.store, labelled.contents, schema), schema)
    asked = rows.filter(pc.not_equal(pc.struct_field(rows[task], "status"), SKIPPED))
    return asked[task].combine_chunks(), asked.select(["doc_id", "content_hash"])


def _places(hashes: pa.StringArray, documents: pa.Table) -> pa.Int32Array:
    """For each of the texts a document that has it."""
    return pc.index_in(hashes, value_set=documents.column("content_hash").combine_chunks())
