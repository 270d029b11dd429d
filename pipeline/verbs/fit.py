"""Fits trained readouts to gold labels and writes their files. Entry point: `fit_readouts`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from pipeline.errors import Option, Problem, SpecError, option_error
from pipeline.evaluation.intervals import Figure, number_or_none
from pipeline.evaluation.metrics import Floats, Scores, score, task_metrics
from pipeline.evaluation.ordinal import rank_correlations
from pipeline.evaluation.readout_fitting import (
    Fitted,
    GoldStates,
    fit,
    loss_limit,
)
from pipeline.fitted.readout import readout_file
from pipeline.gold.labels import Gold, GoldCounts, read_gold, warn_of_chosen
from pipeline.gold.values import UNLABELLED, GoldTask
from pipeline.options import FOLDS, FitOptions
from pipeline.runtime.fitted_files import options_for, refuse_published
from pipeline.runtime.job import Job, make_job
from pipeline.runtime.placement import place, this_machine
from pipeline.spec.labels import YES, part_file
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.named_files import new_file, open_target
from pipeline.verbs import ForPeople
from pipeline.verbs.gold_states import POOLINGS, ReadGold, read_gold_states

SUFFIX = ".safetensors"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the probabilities of held-out rows are from the scores that were fitted."""

    rank_correlation: float | None  # Spearman's; None if all probabilities are equal
    mean_absolute_error: float


@dataclass(frozen=True, slots=True)
class LayerFit:
    """A readout at one layer: its cost, and its scores on held-out rows. Also its JSON form."""

    layer: int
    share: float  # of the decoder's layers
    seconds_per_document: float
    strength: float
    loss: float  # cross-entropy of held-out rows, at the better pooling
    loss_standard_error: float
    scores: Mapping[str, Figure]  # by headline metric
    auroc_by_pooling: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class TaskFit:
    """The readout of a task, or of a label of a task of kind `multi`.

    Also its JSON form, and the figures of its card.
    """

    task: str  # or TASK.LABEL
    kind: Literal["document", "question"]
    rows: int
    unlabelled: int  # documents that were read for other tasks, without a label for this one
    layer: int
    pooling: str
    balanced: bool
    scored: str | None  # the label whose scores the targets are
    readout: str  # path
    loss_limit: float  # the layer is the lowest one with at most this loss
    labels: Mapping[str, int]  # rows
    scores: Mapping[str, Figure]  # of held-out rows; other rows chose their layer and pooling
    agreement: Agreement | None  # with the scores
    layers: tuple[LayerFit, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """The readouts that were fitted to one gold file. Also its JSON form."""

    spec: str
    gold: GoldCounts
    left_out: Mapping[str, int]  # gold documents that could not be read, by reason
    folds: int
    tasks: tuple[TaskFit, ...]
    # Tasks whose readout the spec does not name, or reads otherwise.
    not_in_spec: ForPeople[tuple[str, ...]]


def fit_readouts(
    spec: JobSpec,
    options: FitOptions,
    *,
    cache_dir: Path,
    announce: Callable[[int], Callable[[int], None]] = lambda documents: lambda done: None,
) -> Fit:
    """Fits and writes a readout for every task that the gold has labels for.

    A task of kind `multi` has a readout for each label that has gold.

    The model reads each gold document once. `announce` is called with the number of documents, and
    returns a function that is called with the number of documents of each batch. SpecError if the
    gold has too few labels, or an option is wrong.
    """
    gold = read_gold(options.gold, spec, options.tasks)
    warn_of_chosen(gold, "the figures are those of harder documents than the corpus has")
    tasks = [part for part in spec.model_parts if part.name in gold.tasks]
    if not tasks:
        fix = "all tasks with gold labels have classifiers; a readout is of the model's states"
        raise SpecError([Problem("tasks", fix, list(gold.tasks))])
    questions = {t.name: None if options.document else t.question for t in tasks}
    _check_counts({name: _rows_by_label(gold.tasks[name]) for name in questions}, gold, options)
    paths = _paths(spec, tasks, options)
    job = make_job(_without_files(spec), place(spec.model, this_machine()), cache_dir)
    read = read_gold_states(
        job, gold, questions, layers=options.layers, hold_out=options.hold_out, announce=announce
    )
    states = {task.name: _gold_states(gold.tasks[task.name], task.name, read) for task in tasks}
    _check_counts({name: _texts_by_label(part) for name, part in states.items()}, gold, options)
    # — for small products, several BLAS threads wait for each other
    with threadpool_limits(1, user_api="blas"):
        fits = tuple(
            _fit_task(
                job,
                task,
                questions[task.name],
                states[task.name],
                gold,
                read,
                options,
                path,
            )
            for task, path in zip(tasks, paths, strict=True)
        )
    not_in_spec = tuple(
        task.name
        for task, path in zip(tasks, paths, strict=True)
        if (task.readout, task.question) != (path, questions[task.name])
    )
    return Fit(spec.name, gold.counts, read.left_out, FOLDS, fits, not_in_spec)


def _rows_by_label(gold: GoldTask) -> list[int]:
    return [int((gold.truth == label).sum()) for label in range(len(gold.labels))]


def _texts_by_label(part: GoldStates) -> list[int]:
    _, labels = part.targets.shape
    return [len(np.unique(part.groups[part.truth == label])) for label in range(labels)]


def _without_files(spec: JobSpec) -> JobSpec:
    """What the model is asked, without readouts, which may not exist yet."""
    bare = [part.model_copy(update={"readout": None}) for part in spec.model_parts]
    return spec.model_copy(update={"tasks": tuple(bare)})


def readout_path(task: str, *, named: str | None, to: str | None) -> str:
    """The path of a task's readout: `to`, else the one that the spec names, else `readouts/`.

    That of a label of a task of kind `multi` is in a folder with the task's name.
    """
    if to is None and named is not None:
        return named
    if to is not None and to.endswith(SUFFIX):
        return to
    folder, (name, _, label) = (to or "readouts").rstrip("/"), task.partition(".")
    return part_file(f"{folder}/{name}", label) if label else f"{folder}/{name}{SUFFIX}"


def _paths(spec: JobSpec, tasks: Sequence[TaskSpec], options: FitOptions) -> list[str]:
    """The path of each task's readout; SpecError if one exists and may not be replaced."""
    to = options.to
    if len(tasks) > 1 and to is not None and to.endswith(SUFFIX):
        fix = f"is one file for {len(tasks)} readouts; write a folder, or name one task with --task"
        raise option_error("to", fix, to)
    paths = [readout_path(task.name, named=task.readout, to=to) for task in tasks]
    if repeated := sorted({path for path in paths if paths.count(path) > 1}):
        fix = "is the readout of several tasks; give each task its own file"
        raise SpecError([Problem("tasks.readout", fix, repeated[0])])
    if to is None:
        refuse_published(spec, paths)
    for path in paths:
        new_file(path, options_for(path, spec), overwrite=options.overwrite)
    return paths


def _gold_states(gold: GoldTask, task: str, read: ReadGold) -> GoldStates:
    """The rows of one task that could be read and have a label."""
    labelled = _labelled(gold, read)
    rows = read.rows[labelled]
    targets = np.eye(len(gold.labels))[gold.truth[rows]] if gold.soft is None else gold.soft[rows]
    first, last = read.kinds[task][0], read.kinds[task][-1]
    states = read.states[:, :, first : last + 1 : max(1, last - first)]  # a view: one kind, or two
    return GoldStates(states, targets, read.groups[labelled], labelled)


def _labelled(gold: GoldTask, read: ReadGold) -> NDArray[np.intp]:
    """Which of the documents that were read have a label."""
    return np.flatnonzero(gold.truth[read.rows] != UNLABELLED)


def _check_counts(counts: Mapping[str, Sequence[int]], gold: Gold, options: FitOptions) -> None:
    """SpecError unless every fold can have a document of every label; `counts` is by task."""
    problems = []
    if not 0 <= options.hold_out < 1:
        problems.append(Problem(Option("hold_out"), "write a share, as in 0.2", options.hold_out))
    for task, of_task in counts.items():
        for lack in _lacks(task, gold.tasks[task], of_task):
            fix = f"{lack}; add some, or name only the other tasks with --task"
            problems.append(Problem(Option(part=gold.source), fix))
    if problems:
        raise SpecError(problems)


def _lacks(name: str, task: GoldTask, counts: Sequence[int]) -> Iterator[str]:
    """What the gold lacks for a fit of the task; `counts` are the documents of each label."""
    if task.soft is None or task.scored is None:
        for label, count in zip(task.labels, counts, strict=True):
            if count < FOLDS:
                yield (
                    f"{_which(name, label)} has {count} documents, and one is needed in each of "
                    f"{FOLDS} folds"
                )
    # — a document with a score teaches both labels, so all scores may be on one side of .5
    elif sum(counts) < len(task.labels) * FOLDS:
        yield (
            f"task {name} has {sum(counts)} documents with a score, and {len(task.labels)} are "
            f"needed in each of {FOLDS} folds"
        )
    elif (low := np.nanmin(task.soft[:, 0])) == np.nanmax(task.soft[:, 0]):
        score = low if task.scored == task.labels[0] else 1 - low
        yield f"all scores of task {name} are {score:g}, and a fit needs documents of other scores"


def _which(task: str, label: str) -> str:
    """A label of a task, or a side of a label of a task of kind `multi`, in words."""
    name, _, part = task.partition(".")
    if not part:
        return f"label {label!r} of task {name}"
    return f"label {part!r} of task {name}{'' if label == YES else ', where it does not apply,'}"


def _fit_task(
    job: Job,
    task: TaskSpec,
    question: str | None,
    states: GoldStates,
    gold: Gold,
    read: ReadGold,
    options: FitOptions,
    path: str,
) -> TaskFit:
    """Fits the task's maps, measures them and writes their file."""
    fitted, gold_task = fit(states, folds_number=FOLDS), gold.tasks[task.name]
    measure = partial(score, states.truth, labels=list(task.labels), values=task.values)
    scores = measure(fitted.held_out)
    task_fit = TaskFit(
        task=task.name,
        kind="document" if question is None else "question",
        rows=len(states.targets),
        unlabelled=len(read.rows) - len(states.targets),
        layer=read.layers[fitted.layer],
        pooling=POOLINGS[fitted.pooling],
        balanced=fitted.balanced,
        scored=gold_task.scored,
        readout=path,
        loss_limit=loss_limit(fitted.best_choices),
        labels={label.label: label.support for label in scores.labels},
        scores=scores.headlines,
        agreement=_agreement(states, fitted) if gold_task.scored else None,
        layers=_layer_fits(states, fitted, read, measure),
    )
    maps = dict(zip(read.layers, fitted.maps, strict=True))
    card = _card(job, task_fit, question, options)
    texts = [read.hashes[row] for row in _labelled(gold_task, read)]
    data = readout_file(maps, {**card, "texts": texts})
    open_target(path, options_for(path, job.spec)).write(data)
    return task_fit


def _agreement(gold: GoldStates, fitted: Fitted) -> Agreement:
    """Of two labels, either one gives the same figures."""
    scores, p = gold.targets[:, 0], fitted.held_out[:, 0]
    [rank] = rank_correlations(scores, p, np.ones((1, len(p))))
    return Agreement(number_or_none(rank), float(np.abs(scores - p).mean()))


def _layer_fits(
    gold: GoldStates,
    fitted: Fitted,
    read: ReadGold,
    measure: Callable[[Floats], Scores],
) -> tuple[LayerFit, ...]:
    """The figures of each layer that was read."""
    return tuple(
        LayerFit(
            layer=layer,
            share=layer / read.all_layers,
            seconds_per_document=read.seconds[n],
            strength=fitted.choices[n].strength,
            loss=fitted.best_choices[n].loss,
            loss_standard_error=fitted.best_choices[n].standard_error,
            scores=measure(fitted.by_layer[n]).headlines,
            auroc_by_pooling={
                POOLINGS[pooling]: number_or_none(task_metrics(gold.truth, p)["auroc"])
                for pooling, p in enumerate(fitted.by_place[n])
            },
        )
        for n, layer in enumerate(read.layers)
    )


def _card(job: Job, fitted: TaskFit, question: str | None, options: FitOptions) -> dict[str, Any]:
    """The model, prompt and labels that the maps may be used with, and the scores."""
    spec, packages = job.spec, ("torch", "transformers", "numpy", "scipy", "scikit-learn")
    figures = asdict(fitted)
    same = ("task", "kind", "pooling", "layer", "rows", "balanced", "scores", "scored", "agreement")
    return {
        "format": FORMAT,
        **{name: figures[name] for name in same},
        "labels": list(fitted.labels),
        "question": question,
        "layers": {
            str(layer.layer): {
                **{name: figure.value for name, figure in layer.scores.items()},
                "strength": layer.strength,
                "share": layer.share,
            }
            for layer in fitted.layers
        },
        "folds": FOLDS,
        "hold_out": options.hold_out,
        "model": {
            "weights": dict(job.readers[0].files.hashes),
            "dtype": job.placement.dtype,
            "int8": spec.model.is_int8,
            "kv": spec.model.kv,
        },
        "prompt": spec.prompt.model_dump(mode="json"),
        "documents": spec.documents.model_dump(mode="json", include={"max_tokens", "too_long"}),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
    }
