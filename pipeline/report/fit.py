"""Fitted readouts and calibrations as tables for a terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline.evaluation.fitting import FIGURES
from pipeline.evaluation.metrics import Figure
from pipeline.fitted.calibration import Calibration, Prior, Temperature
from pipeline.report.console import escape_controls, two_columns
from pipeline.verbs.calibrate import Calibrated
from pipeline.verbs.fit import Fit, TaskFit, scores_json

_NAMES = {"auroc": "AUROC", "f1": "macro F1", "accuracy": "accuracy", "ece": "ECE"}


def show_fit(fit: Fit, console: Console) -> None:
    """Prints the gold, then each task's layers, learning curve and file."""
    console.print(two_columns(dict(_gold(fit))), markup=False)
    for task in fit.tasks:
        console.print()
        console.print(_layers(task), markup=False)
        if task.curve:
            console.print(_curve(task, fit.splits), markup=False)
        console.print(two_columns(dict(_readout(fit, task))), markup=False)


def _gold(fit: Fit) -> Iterator[tuple[str, str]]:
    gold = fit.gold
    yield "gold", escape_controls(f"{gold.source}, {gold.rows:,} documents")
    if gold.repeated:
        yield "repeated", f"{gold.repeated:,} gold rows repeat another; each document counts once"
    if gold.contradictory:
        yield "contradictory", f"{gold.contradictory:,} gold rows of documents with two labels"
    for reason, documents in fit.left_out.items():
        yield "left out", escape_controls(f"{documents:,} documents: {reason}")
    yield "scores", f"of held-out rows in {fit.folds} folds, with 95 % intervals"


def _layers(task: TaskFit) -> Table:
    several = len(task.layers[0].by_pooling) > 1
    both = [", ".join(task.layers[0].by_pooling)] if several else []
    names = ("layer", "depth", "s/doc", "AUROC", "macro F1", "ECE", *both)
    states = f"; at the right the AUROC of both states: {both[0]}" if several else ""
    table = _table(f"{task.task}: {task.kind} readout{states}", names)
    for each in task.layers:
        headlines = each.scores.headlines
        table.add_row(
            f"{'→ ' if each.layer == task.layer else ''}{each.layer}",
            f"{each.share:.0%}",
            f"{each.seconds:.3f}",
            _figure(headlines["auroc"]),
            _figure(headlines["f1"]),
            _number(headlines["ece"].value),
            *([", ".join(map(_short, each.by_pooling.values()))] if several else []),
        )
    return table


def _curve(task: TaskFit, splits: int) -> Table:
    title = (
        f"{task.task}: layer {task.layer} by number of gold rows, {splits} random splits, "
        f"{task.curve_held_out} held out"
    )
    table = _table(title, ("rows", *(_NAMES[name] for name in FIGURES)))
    for point in task.curve:
        shown = (_figure(point.figures[name]) for name in FIGURES)
        table.add_row(f"{point.rows:,}", *shown)
    return table


def _table(title: str, names: Sequence[str]) -> Table:
    """A table that fits a terminal of 80 columns."""
    narrow = {"box": SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title=title, title_justify="left", **narrow)  # type: ignore[arg-type]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _readout(fit: Fit, task: TaskFit) -> Iterator[tuple[str, str]]:
    state = "last token" if task.pooling == "last" else "mean of the document's tokens"
    yield "readout", escape_controls(f"{task.path}: layer {task.layer}, {state}")
    headlines = task.scores.headlines
    shown = ", ".join(f"{name} {_figure(headlines[key])}" for key, name in _NAMES.items())
    yield "scores", f"{shown}: layer and state, too, are chosen without the row"
    yield "rows", _rows(task)
    if task.balanced:
        yield "balanced", "labels are uneven: the fit weights them, and calibration corrects that"


def _rows(task: TaskFit) -> str:
    counts = ", ".join(f"{each.label} {each.support:,}" for each in task.scores.labels)
    without = f"; {task.unlabelled:,} without a label for this task" if task.unlabelled else ""
    return escape_controls(f"{task.rows:,}: {counts}{without}")


def _figure(figure: Figure) -> str:
    if figure.value is None:
        return "-"
    if figure.low is None or figure.high is None:
        return _number(figure.value)
    low, high = (f"{bound:.2f}".removeprefix("0") for bound in (figure.low, figure.high))
    return f"{_number(figure.value)} {low}-{high}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _short(value: float | None) -> str:
    return _number(value).removeprefix("0")


def fit_json(fit: Fit) -> dict[str, Any]:
    """The readouts as JSON values."""
    return {
        "spec": fit.spec,
        "gold": {
            "source": fit.gold.source,
            "documents": fit.gold.rows,
            "repeated": fit.gold.repeated,
            "contradictory": fit.gold.contradictory,
            "left_out": dict(fit.left_out),
        },
        "folds": fit.folds,
        "tasks": [_task_json(task, fit.splits) for task in fit.tasks],
    }


def _task_json(task: TaskFit, splits: int) -> dict[str, Any]:
    return {
        "task": task.task,
        "readout": task.path,
        "kind": task.kind,
        "labels": {each.label: each.support for each in task.scores.labels},
        "rows": task.rows,
        "unlabelled": task.unlabelled,
        "layer": task.layer,
        "pooling": task.pooling,
        "balanced": task.balanced,
        "scores": scores_json(task.scores),
        "layers": [
            {
                "layer": each.layer,
                "share": each.share,
                "seconds_per_document": each.seconds,
                "strength": each.strength,
                "scores": scores_json(each.scores),
                "auroc_by_pooling": dict(each.by_pooling),
            }
            for each in task.layers
        ],
        "curve": {
            "splits": splits,
            "held_out": task.curve_held_out,
            "rows": [
                {
                    "rows": point.rows,
                    **{
                        name: {"value": each.value, "low": each.low, "high": each.high}
                        for name, each in point.figures.items()
                    },
                }
                for point in task.curve
            ],
        },
    }


def calibrated_json(calibrated: Calibrated) -> dict[str, Any]:
    """The content of the calibration file, and its path."""
    content: dict[str, Any] = json.loads(calibrated.file.json())
    return {"path": calibrated.path, **content}


def show_calibrated(calibrated: Calibrated, console: Console) -> None:
    """Prints the calibration, and the answers and gold labels that it was made from."""
    file = calibrated.file
    of_gold = f", gold {file.source['gold']}" if "gold" in file.source else ""
    rows = {
        "file": calibrated.path,
        "task": file.task,
        "made from": f"{file.rows:,} documents of snapshot {file.source['snapshot']}{of_gold}",
        file.calibration.method: _parameters(file.calibration),
    }
    console.print(two_columns(rows), markup=False)


def _parameters(calibration: Calibration) -> str:
    change = calibration.change
    if isinstance(change, Prior):
        shares = zip(calibration.labels, change.prior, strict=True)
        return ", ".join(f"{label} {share:.3f}" for label, share in shares)
    if isinstance(change, Temperature):
        return f"{change.temperature:.3f}"
    return ", ".join(f"{len(curve.x)} knots" for curve in change.curves)
