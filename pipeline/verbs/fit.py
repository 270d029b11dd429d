"""Fit trained readouts to gold labels, and write each with a card that says what it is worth.

Knows the order of the work: gold, states, maps, figures, files. Knows nothing of how documents are
read, of how maps are fitted, of Ray, or of how results are shown.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np

from pipeline.errors import Problem, SpecError
from pipeline.evaluation.fitting import (
    HELD_OUT,
    SPLITS,
    CurvePoint,
    Fitted,
    GoldStates,
    fit,
    learning_curve,
)
from pipeline.evaluation.metrics import Floats
from pipeline.evaluation.scores import Scores, score
from pipeline.gold.labels import UNLABELLED, Gold, GoldTask, read_gold
from pipeline.options import FitOptions, GoldOptions
from pipeline.runtime.fitted_files import options_for, write_fitted
from pipeline.runtime.job import Job, make_job
from pipeline.runtime.placement import place, this_machine
from pipeline.spec.schema import JobSpec, TaskSpec
from pipeline.verbs.fit_card import Kind, card, readout_bytes
from pipeline.verbs.gold_states import POOLINGS, ReadGold, read_gold_states

SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class LayerFit:
    """What a readout at one layer is worth and costs; scores of rows that were held out."""

    layer: int
    share: float  # of the decoder's layers
    seconds: float  # a document
    scores: Scores
    by_pooling: Mapping[str, float | None]  # AUROC
    strength: float


@dataclass(frozen=True, slots=True)
class TaskFit:
    """One task's readout."""

    task: str
    kind: Kind
    labels: tuple[str, ...]
    rows: int
    unlabelled: int  # gold documents without a label for this task
    pooling: str
    layer: int
    balanced: bool
    scores: Scores  # with layer and pooling, too, chosen without the row
    layers: tuple[LayerFit, ...]
    curve: tuple[CurvePoint, ...]
    curve_held_out: int
    path: str


@dataclass(frozen=True, slots=True)
class Fit:
    """The readouts of one gold."""

    spec: str
    gold: Gold
    left_out: Mapping[str, int]  # gold documents that could not be read, by reason
    folds: int
    splits: int
    tasks: tuple[TaskFit, ...]


def fit_readouts(
    spec: JobSpec,
    source: str,
    how: GoldOptions,
    options: FitOptions,
    *,
    cache_dir: Path,
    start: Callable[[int], Callable[[int], None]] = lambda documents: lambda done: None,
) -> Fit:
    """A readout of every task that the gold at `source` has labels for.

    All documents are read once for all tasks. `start` as `read_gold_states` has it.
    """
    gold = read_gold(source, spec, how)
    tasks = [task for task in spec.tasks if task.name in gold.tasks]
    questions = {t.name: None if options.document else t.question for t in tasks}
    _check_labels(_labels_of_gold(gold), gold, options.folds, options.rows)
    paths = _paths(tasks, options.to)
    job = make_job(_without_readouts(spec), place(spec.model, this_machine()), cache_dir)
    read = read_gold_states(job, gold, questions, layers=options.layers, start=start)
    states = {task.name: _gold_states(gold.tasks[task.name], task.name, read) for task in tasks}
    _check_labels(_labels_of_states(states), gold, options.folds, options.rows)
    fits = tuple(
        _fit_task(job, task, questions[task.name], states[task.name], read, options, path)
        for task, path in zip(tasks, paths, strict=True)
    )
    return Fit(spec.name, gold, read.left_out, options.folds, SPLITS, fits)


def _without_readouts(spec: JobSpec) -> JobSpec:
    """The spec before it has what is made here: the files that it names need not be there yet."""
    unmade = {"readout": None, "calibration": None}
    tasks = tuple(task.model_copy(update=unmade) for task in spec.tasks)
    known = {"tasks": tasks, "exit": None}
    return spec.model_copy(update={k: v for k, v in known.items() if k in JobSpec.model_fields})


def readout_path(task: str, *, named: str | None, to: str | None, tasks: int) -> str | None:
    """Where a task's readout goes: `to`, else where the spec names it, else below `readouts/`.

    None where `to` is one file and there are several tasks to write to it.
    """
    if to is None:
        return named or f"readouts/{task}{SUFFIX}"
    if to.endswith(SUFFIX):
        return to if tasks == 1 else None
    return f"{to.rstrip('/')}/{task}{SUFFIX}"


def _paths(tasks: Sequence[TaskSpec], to: str | None) -> list[str]:
    found = [readout_path(task.name, named=task.readout, to=to, tasks=len(tasks)) for task in tasks]
    paths = [path for path in found if path is not None]
    if len(paths) < len(tasks):
        fix = f"is one file for {len(tasks)} tasks; write a folder, or name one task with --task"
        raise SpecError([Problem("--to", fix, to)])
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        fix = "is the readout of several tasks; give each task a file of its own"
        raise SpecError([Problem("readout", fix, twice[0])])
    return paths


def _gold_states(said: GoldTask, task: str, read: ReadGold) -> GoldStates:
    """The rows of one task: those that can be read and have a label."""
    labelled = np.flatnonzero(said.truth[read.rows] != UNLABELLED)
    rows = read.rows[labelled]
    truth = said.truth[rows]
    hard: Floats = np.eye(len(said.labels))[truth]
    targets = hard if said.soft is None else said.soft[rows]
    states = read.states[labelled][:, :, list(read.kinds[task])]
    return GoldStates(states, targets, read.groups[labelled])


def _labels_of_gold(gold: Gold) -> dict[str, list[int]]:
    """By task: documents of each label, as far as the gold tells."""
    return {
        task: [int((said.truth == label).sum()) for label in range(len(said.labels))]
        for task, said in gold.tasks.items()
    }


def _labels_of_states(states: Mapping[str, GoldStates]) -> dict[str, list[int]]:
    """By task: texts of each label, of those that could be read."""
    return {
        task: [len(np.unique(rows.groups[rows.truth == n])) for n in range(rows.targets.shape[1])]
        for task, rows in states.items()
    }


def _check_labels(
    documents: Mapping[str, Sequence[int]], gold: Gold, folds: int, curve: Sequence[int]
) -> None:
    """SpecError unless every label is in enough documents to be fitted and held out."""
    problems = [] if folds >= 2 else [Problem("--folds", "write 2 or more", folds)]
    for task, counts in documents.items():
        for label, count in zip(gold.tasks[task].labels, counts, strict=True):
            if count < folds:
                fix = (
                    f"label {label!r} has {count} documents, and one is needed in each of "
                    f"{folds} folds; give more, or fit the other tasks alone with --task"
                )
                problems.append(Problem(f"gold of task {task}", fix, gold.source))
        held_out = _held_out(sum(counts))
        most = sum(counts) - held_out
        if wrong := [number for number in curve if not 2 <= number <= most]:
            fix = f"{held_out} documents of {task} are held out: write 2 to {most}"
            problems.append(Problem("--rows", fix, wrong[0]))
    if problems:
        raise SpecError(problems)


def _held_out(rows: int) -> int:
    """Of the learning curve: as many as there should be, or half of what there is."""
    return min(HELD_OUT, rows // 2)


def _fit_task(
    job: Job,
    task: TaskSpec,
    question: str | None,
    gold: GoldStates,
    read: ReadGold,
    options: FitOptions,
    path: str,
) -> TaskFit:
    """The task's maps, what they are worth, and their file."""
    fitted = fit(gold, folds_number=options.folds)
    at_best = gold.at(fitted.layer, fitted.pooling)
    found = TaskFit(
        task=task.name,
        kind="document" if question is None else "question",
        labels=tuple(task.labels),
        rows=len(gold.targets),
        unlabelled=len(read.rows) - len(gold.targets),
        pooling=POOLINGS[fitted.pooling],
        layer=read.layers[fitted.layer],
        balanced=fitted.balanced,
        scores=score(gold.truth, fitted.held_out, list(task.labels)),
        layers=tuple(_layer(n, gold, fitted, read, task) for n in range(len(read.layers))),
        curve=learning_curve(at_best, options.rows, held_out=_held_out(len(gold.targets))),
        curve_held_out=_held_out(len(gold.targets)),
        path=path,
    )
    written = card(
        job, found, question=question, folds=options.folds, created_at=_now(), versions=_versions()
    )
    maps = dict(zip(read.layers, fitted.maps, strict=True))
    write_fitted(path, readout_bytes(written, maps), options_for(path, job.spec))
    return found


def _layer(
    place: int, gold: GoldStates, fitted: Fitted, read: ReadGold, task: TaskSpec
) -> LayerFit:
    labels = list(task.labels)
    by_pooling = {
        POOLINGS[pooling]: score(gold.truth, p, labels, resamples=1).headlines["auroc"].value
        for pooling, p in enumerate(fitted.by_place[place])
    }
    return LayerFit(
        layer=read.layers[place],
        share=read.layers[place] / read.all_layers,
        seconds=read.seconds[place],
        scores=score(gold.truth, fitted.by_layer[place], labels),
        by_pooling=by_pooling,
        strength=fitted.choices[place].strength,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "numpy", "scipy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
