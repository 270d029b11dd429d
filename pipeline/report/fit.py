"""Fitted readouts as tables for a terminal."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby

import yaml

from pipeline.report.console import Grid, Part, interval, number, printed
from pipeline.spec.labels import NO, YES, task_of
from pipeline.verbs.fit import Fit, PositionFit, TaskFit

_AT = {
    ("document", "last"): "document, its last token",
    ("document", "mean"): "document, mean of its tokens",
    ("question", "last"): "after the question",
}
_COLUMNS = ("state", "layer", "loss (cross-entropy)", "AUROC", "accuracy")


@printed
def show_fit(fit: Fit, *, spec_file: str = "SPEC") -> Iterator[Part]:
    """The gold, each task's positions, layers and file, and the next command.

    The labels of a task of kind `multi` are one table, at the position and layer of each.
    """
    yield [*_gold(fit)]
    by_task = groupby(fit.tasks, lambda task: task_of(task.task))
    parts = {name: [*own] for name, own in by_task}
    for name, own in parts.items():
        if name == own[0].task:
            yield from ("", _positions(own[0]), "", _layers(own[0]), "", [*_facts(own[0])])
        else:
            yield from ("", _labels(name, own))
    for name, own in parts.items():
        if not all(task.in_spec for task in own):
            yield from ("", f"write into {spec_file}, task {name}:", *_keys(own[0], spec_file))
    # — a string, which the console does not wrap, so that the command stays on one line
    yield from ("", f"next  assay run {shlex.quote(spec_file)}")


def _keys(task: TaskFit, spec_file: str) -> Iterator[str]:
    """The lines of the spec that name the readout, whose path is relative to the spec's folder."""
    path = task.readout
    if task_of(task.task) != task.task:
        path = path.rpartition("/")[0]
    relative = os.path.relpath(path, os.path.dirname(spec_file) or ".")
    if "://" not in path and not (os.path.isabs(path) and relative.startswith(os.pardir)):
        path = relative
    keys: dict[str, str | None] = {"question": None} if task.kind == "document" else {}
    keys["readout"] = path
    lines = yaml.safe_dump(keys, sort_keys=False, width=10_000)
    yield from (f"    {line}" for line in lines.splitlines())


def _gold(fit: Fit) -> Iterator[tuple[str, str]]:
    gold = fit.gold
    yield "gold", f"{gold.source}, {gold.documents:,} documents"
    yield from gold.merged
    for reason, documents in fit.left_out.items():
        yield "left out", f"{documents:,} documents: {reason}"
    yield "figures", f"of held-out rows in {fit.folds} folds, with 95 % intervals"


def _positions(task: TaskFit) -> Grid:
    """Where the state can be taken; the first is that of the readout."""
    ordered = sorted(task.positions, key=lambda at: at.position != task.kind)
    rows = [_cells(task, at) for at in ordered]
    return Grid(f"{task.task}: where the readout takes the state", _COLUMNS, rows)


def _cells(task: TaskFit, at: PositionFit) -> tuple[str, ...]:
    """The figures of _COLUMNS."""
    figures = (at.loss, at.scores["auroc"], at.scores["accuracy"])
    chosen = "→ " * (at.position == task.kind)
    return f"{chosen}{_AT[at.position, at.pooling]}", str(at.layer), *map(interval, figures)


def _layers(task: TaskFit) -> Grid:
    rows = [
        (
            f"{'→ ' * (layer.layer == task.layer)}{layer.layer}",
            f"{layer.share:.0%}",
            interval(layer.scores["auroc"]),
            interval(layer.scores["f1"]),
        )
        for layer in task.layers
    ]
    names = ("layer", "of all", "AUROC", "macro F1")
    title = f"layers, each fitted alone ({_AT[task.kind, task.pooling]})"
    return Grid(title, names, rows, texts=0)


def _labels(name: str, labels: Sequence[TaskFit]) -> Grid:
    """The readouts of a task of kind `multi`: a row for each label and position."""
    rows = [
        (of.task.partition(".")[2], *_cells(of, at), f"{of.labels[YES]:,}", f"{of.labels[NO]:,}")
        for of in labels
        for at in of.positions
    ]
    names = ("label", *_COLUMNS, "yes", "no")
    return Grid(f"{name}: a readout for each label, yes or no", names, rows, texts=2)


def _facts(task: TaskFit) -> Iterator[tuple[str, str]]:
    yield "readout", f"{task.readout}: layer {task.layer}, {_AT[task.kind, task.pooling]}"
    if len(task.layers) > 1:
        best = min(task.layers, key=lambda layer: layer.loss)
        rule = f"within one standard error of the smallest (layer {best.layer})"
        yield "layer", f"{task.layer} is the cheapest with a loss {rule}"
    counts = ", ".join(f"{label} {rows:,}" for label, rows in task.labels.items())
    without = f"; {task.unlabelled:,} without a label for this task" if task.unlabelled else ""
    yield "rows", f"{task.rows:,}: {counts}{without}"
    ordinal = {"qwk": "quadratic weighted kappa", "mae": "mean absolute error"}
    for key, name in {**ordinal, "spearman": "rank correlation"}.items():
        if key in task.scores:
            yield name, interval(task.scores[key])
    if task.scored and task.agreement:
        yield (
            "targets",
            f"scores of {task.scored}; for metrics, a score above .5 counts as {task.scored}",
        )
        rank, error = task.agreement.rank_correlation, task.agreement.mean_absolute_error
        shown = f"rank correlation {number(rank)}, mean absolute error {number(error)}"
        yield "agreement", f"{shown}: held-out probabilities against the scores"
    if task.balanced:
        yield "balanced", "labels are uneven: the fit weights them, and the intercepts correct that"
