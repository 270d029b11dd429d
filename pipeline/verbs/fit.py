"""Fits trained readouts to gold labels and writes their files. Entry point: `fit_readouts`."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from pipeline.errors import Option, Problem, SpecError, option_error
from pipeline.evaluation.intervals import Figure, mean_figure, number_or_none
from pipeline.evaluation.metrics import score
from pipeline.evaluation.ordinal import rank_correlations
from pipeline.evaluation.readout_fitting import Fitted, GoldStates, fit, row_losses
from pipeline.fitted.readout import readout_file
from pipeline.gold.labels import Gold, GoldCounts, read_gold, warn_of_chosen
from pipeline.gold.values import UNLABELLED, GoldTask
from pipeline.options import FOLDS, FitOptions
from pipeline.runtime.fitted_files import options_for, refuse_published
from pipeline.runtime.job import Job, make_job
from pipeline.runtime.placement import place, this_machine
from pipeline.runtime.progress import Progress, ignore
from pipeline.spec.labels import YES, part_file, task_of
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.named_files import new_file, open_target
from pipeline.verbs.gold_states import POOLINGS, Position, ReadGold, read_as, read_gold_states

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
    strength: float
    loss: float  # cross-entropy of held-out rows, at the better pooling
    scores: Mapping[str, Figure]  # by headline metric


@dataclass(frozen=True, slots=True)
class PositionFit:
    """The readout of the states at one position, measured on rows that chose neither its layer nor
    its pooling. Also its JSON form.
    """

    position: Position
    layer: int
    pooling: str
    loss: Figure  # mean cross-entropy of held-out rows
    scores: Mapping[str, Figure]  # by headline metric


@dataclass(frozen=True, slots=True)
class TaskFit:
    """The readout of a task, or of a label of a task of kind `multi`.

    Also its JSON form, and the figures of its card.
    """

    task: str  # or TASK.LABEL
    kind: Position  # with the smallest loss; all labels of a task have the same one
    rows: int
    unlabelled: int  # documents that were read for other tasks, without a label for this one
    layer: int
    pooling: str
    balanced: bool
    scored: str | None  # the label whose scores the targets are
    readout: str  # path
    in_spec: bool  # whether the spec names this readout, and reads it at this position
    labels: Mapping[str, int]  # rows
    scores: Mapping[str, Figure]  # of held-out rows, as the position has them
    agreement: Agreement | None  # with the scores
    positions: tuple[PositionFit, ...]
    layers: tuple[LayerFit, ...]  # at the position of the readout


@dataclass(frozen=True, slots=True)
class Fit:
    """The readouts that were fitted to one gold file. Also its JSON form."""

    spec: str
    gold: GoldCounts
    left_out: Mapping[str, int]  # gold documents that could not be read, by reason
    folds: int
    tasks: tuple[TaskFit, ...]


def fit_readouts(
    spec: JobSpec,
    options: FitOptions,
    *,
    cache_dir: Path,
    folder: str = "",
    announce: Callable[[Progress], None] = ignore,
) -> Fit:
    """Fits and writes a readout for every task that the gold has labels for.

    A task of kind `multi` has a readout for each label that has gold. The model reads each gold
    document once. For a task with a question, both the state after the question and that of the
    document are fitted, and the position with the smaller loss of held-out rows is written.

    `folder` is that of the spec's file: readouts without a path are in `readouts` there. SpecError
    if the gold has too few labels, or an option is wrong.
    """
    if not 0 <= options.hold_out < 1:
        raise option_error("hold_out", "write a share, as in 0.2", options.hold_out)
    gold = read_gold(options.gold, spec, options.tasks)
    warn_of_chosen(gold)
    spec = spec.model_copy(update={"tasks": spec.own_tasks})
    tasks = {part.name: part for part in spec.model_parts if part.name in gold.tasks}
    if not tasks:
        fix = "all tasks with gold labels have classifiers or models of their own; a readout is of "
        fix += "the model's states"
        raise SpecError([Problem("tasks", fix, list(gold.tasks))])
    truths = {name: gold.tasks[name].truth for name in tasks}
    _check_counts({n: Counter(t[t != UNLABELLED].tolist()) for n, t in truths.items()}, gold)
    usual = os.path.normpath(os.path.join(folder, "readouts"))
    paths = _paths(spec, tasks.values(), options, usual)
    # — what the model is asked, without readouts, which may not exist yet
    bare = tuple(part.model_copy(update={"readout": None}) for part in spec.model_parts)
    asked = spec.model_copy(update={"tasks": bare})
    job = make_job(asked, place(spec.model, this_machine()), cache_dir)
    read = read_gold_states(
        job, gold, tasks, layers=options.layers, hold_out=options.hold_out, announce=announce
    )
    announce(Progress("fitting"))
    reading = _Reading(job, gold, read, options.hold_out)
    rows = {name: reading.states(name)["document"] for name in tasks}
    pairs = {name: {*zip(of.groups, of.truth, strict=True)} for name, of in rows.items()}
    _check_counts({n: Counter(label for _, label in own) for n, own in pairs.items()}, gold)
    parts = [[*own] for _, own in groupby(tasks.values(), lambda part: task_of(part.name))]
    # — for small products, several BLAS threads wait for each other
    with threadpool_limits(1, user_api="blas"):
        fits = tuple(each for own in parts for each in reading.fits(own, paths))
    return Fit(spec.name, gold.counts, read.left_out, FOLDS, fits)


def readout_path(task: str, *, named: str | None, to: str | None, usual: str) -> str:
    """The path of a task's readout: `to`, else the one that the spec names, else in `usual`.

    That of a label of a task of kind `multi` is in a folder with the task's name.
    """
    if to is None and named is not None:
        return named
    if to is not None and to.endswith(SUFFIX):
        return to
    folder, (name, _, label) = (to or usual).rstrip("/"), task.partition(".")
    return part_file(f"{folder}/{name}", label) if label else f"{folder}/{name}{SUFFIX}"


def _paths(
    spec: JobSpec, tasks: Collection[TaskSpec], options: FitOptions, usual: str
) -> dict[str, str]:
    """The path of each task's readout; SpecError if one exists and may not be replaced."""
    to = options.to
    if len(tasks) > 1 and to is not None and to.endswith(SUFFIX):
        fix = f"is one file for {len(tasks)} readouts; write a folder, or name one task with --task"
        raise option_error("to", fix, to)
    paths = {t.name: readout_path(t.name, named=t.readout, to=to, usual=usual) for t in tasks}
    written = list(paths.values())
    if repeated := sorted({path for path in written if written.count(path) > 1}):
        fix = "is the readout of several tasks; give each task its own file"
        raise SpecError([Problem("tasks.readout", fix, repeated[0])])
    if to is None:
        refuse_published(spec, written)
    for path in written:
        new_file(path, options_for(path, spec), overwrite=options.overwrite)
    return paths


def _check_counts(counts: Mapping[str, Counter[int]], gold: Gold) -> None:
    """SpecError unless every fold can have a document of every label.

    `counts` are the documents by number of the label, by task.
    """
    fix = "add some, or name only the other tasks with --task"
    place = Option(part=gold.source)
    problems = [
        Problem(place, f"{lack}; {fix}")
        for name, of_task in counts.items()
        for lack in _lacks(name, gold.tasks[name], of_task)
    ]
    if problems:
        raise SpecError(problems)


def _lacks(name: str, task: GoldTask, counts: Counter[int]) -> Iterator[str]:
    """What the gold lacks for a fit of the task."""
    if task.soft is None or task.scored is None:
        for number, label in enumerate(task.labels):
            if counts[number] < FOLDS:
                yield (
                    f"{_which(name, label)} has {counts[number]} documents, and one is needed in "
                    f"each of {FOLDS} folds"
                )
    # — a document with a score is a row of both labels, so all scores may be on one side of .5
    elif counts.total() < len(task.labels) * FOLDS:
        yield (
            f"task {name} has {counts.total()} documents with a score, and {len(task.labels)} are "
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


@dataclass(frozen=True, slots=True)
class _Reading:
    """The states of the gold documents, and what is fitted to them."""

    job: Job
    gold: Gold
    read: ReadGold
    hold_out: float

    def labelled(self, task: str) -> NDArray[np.intp]:
        """Which of the documents that were read have a label."""
        return np.flatnonzero(self.gold.tasks[task].truth[self.read.rows] != UNLABELLED)

    def states(self, task: str) -> dict[Position, GoldStates]:
        """The rows of one task that have a label, by position."""
        of_gold, read, labelled = self.gold.tasks[task], self.read, self.labelled(task)
        rows = read.rows[labelled]
        hard = np.eye(len(of_gold.labels))[of_gold.truth[rows]]
        targets = hard if of_gold.soft is None else of_gold.soft[rows]
        # — a view of one kind or of two: the states may be larger than memory
        return {
            position: GoldStates(
                read.states[:, :, kinds[0] : kinds[-1] + 1 : max(1, kinds[-1] - kinds[0])],
                targets,
                read.groups[labelled],
                labelled,
            )
            for position, kinds in read.positions[task].items()
        }

    def fits(self, parts: Sequence[TaskSpec], paths: Mapping[str, str]) -> Iterator[TaskFit]:
        """Fits a task, or the labels of one of kind `multi`, at the better position, and writes.

        The figures of that position are slightly optimistic, because they chose it.
        """
        states = {part.name: self.states(part.name) for part in parts}
        fitted = {n: {at: fit(rows) for at, rows in of.items()} for n, of in states.items()}
        measured = {
            part.name: {
                at: self._position(part, at, states[part.name][at], own)
                for at, own in fitted[part.name].items()
            }
            for part in parts
        }
        kind = min(
            measured[parts[0].name],
            key=lambda at: sum(of_part[at].loss.value or 0 for of_part in measured.values()),
        )
        for part in parts:
            rows, own = states[part.name][kind], fitted[part.name][kind]
            of_task = self._task(part, rows, own, measured[part.name], kind, paths[part.name])
            self._write(part, of_task, own)
            yield of_task

    def _position(
        self, task: TaskSpec, position: Position, rows: GoldStates, fitted: Fitted
    ) -> PositionFit:
        p = fitted.held_out
        return PositionFit(
            position=position,
            layer=self.read.layers[fitted.layer],
            pooling=POOLINGS[fitted.pooling],
            loss=mean_figure(row_losses(p, rows.targets), least=0),
            scores=score(rows.truth, p, list(task.labels), values=task.values).headlines,
        )

    def _task(
        self,
        task: TaskSpec,
        rows: GoldStates,
        fitted: Fitted,
        positions: Mapping[Position, PositionFit],
        kind: Position,
        path: str,
    ) -> TaskFit:
        own, scored = positions[kind], self.gold.tasks[task.name].scored
        counts = np.bincount(rows.truth, minlength=len(task.labels)).tolist()
        return TaskFit(
            task=task.name,
            kind=kind,
            rows=len(rows.targets),
            unlabelled=len(self.read.rows) - len(rows.targets),
            layer=own.layer,
            pooling=own.pooling,
            balanced=fitted.balanced,
            scored=scored,
            readout=path,
            in_spec=task.readout == path and (task.question is None) == (kind == "document"),
            labels=dict(zip(task.labels, counts, strict=True)),
            scores=own.scores,
            agreement=_agreement(rows, fitted) if scored else None,
            positions=tuple(positions.values()),
            layers=tuple(self._layers(task, rows, fitted)),
        )

    def _layers(self, task: TaskSpec, rows: GoldStates, fitted: Fitted) -> Iterator[LayerFit]:
        """The figures of each layer that was read."""
        measure = partial(score, rows.truth, labels=list(task.labels), values=task.values)
        for n, layer in enumerate(self.read.layers):
            best = fitted.best_choices[n]
            yield LayerFit(
                layer=layer,
                share=layer / self.read.all_layers,
                strength=fitted.choices[n].strength,
                loss=best.loss,
                scores=measure(fitted.by_layer[n]).headlines,
            )

    def _write(self, task: TaskSpec, of_task: TaskFit, fitted: Fitted) -> None:
        """Writes the readout's file."""
        texts = [self.read.hashes[row] for row in self.labelled(task.name)]
        maps = dict(zip(self.read.layers, fitted.maps, strict=True))
        data = readout_file(maps, {**self._card(task, of_task), "texts": texts})
        open_target(of_task.readout, options_for(of_task.readout, self.job.spec)).write(data)

    def _card(self, task: TaskSpec, fitted: TaskFit) -> dict[str, Any]:
        """The model, prompt and labels that the maps may be used with, and the scores."""
        packages = ("torch", "transformers", "numpy", "scipy", "scikit-learn")
        figures = asdict(fitted)
        same = ("task", "kind", "pooling", "layer", "rows", "balanced", "scores", "scored")
        return {
            "format": FORMAT,
            **{name: figures[name] for name in (*same, "agreement")},
            "labels": list(fitted.labels),
            "question": None if fitted.kind == "document" else task.question,
            "folds": FOLDS,
            "hold_out": self.hold_out,
            **read_as(self.job),
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in packages},
            },
        }


def _agreement(gold: GoldStates, fitted: Fitted) -> Agreement:
    """Of two labels, either one gives the same figures."""
    scores, p = gold.targets[:, 0], fitted.held_out[:, 0]
    [rank] = rank_correlations(scores, p, np.ones((1, len(p))))
    return Agreement(number_or_none(rank), float(np.abs(scores - p).mean()))
