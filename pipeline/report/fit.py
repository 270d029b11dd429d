"""Fitted readouts and thresholds as tables for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from pipeline.report.console import Grid, Part, interval, number, printed, warnings
from pipeline.spec.labels import NO, YES, task_of
from pipeline.verbs.cascade import ChosenThresholds
from pipeline.verbs.fit import Fit, TaskFit

_UNDECIDED = (
    "no stage before the last decides anything: the scores are too close to each other, or the "
    "promise is too strict"
)
_NAMES = {
    "qwk": "quadratic weighted kappa",
    "mae": "mean absolute error",
    "spearman": "rank correlation",
    "auroc": "AUROC",
    "f1": "macro F1",
    "accuracy": "accuracy",
    "ece": "ECE",
}


@printed
def show_fit(fit: Fit, *, spec_file: str = "SPEC") -> Iterator[Part]:
    """The gold, each task's layers and file, and the next command.

    The labels of a task of kind `multi` are one table, at the layer of each.
    """
    yield [*_gold(fit)]
    parts: dict[str, list[TaskFit]] = {}
    for task in fit.tasks:
        if task_of(task.task) == task.task:
            yield from ("", _layers(task), [*_readout(fit, task)])
        else:
            parts.setdefault(task_of(task.task), []).append(task)
    for name, labels in parts.items():
        yield from ("", _labels(name, labels))
    # — lines, because neither a command nor a path is broken
    yield from ("", *(f"{name}  {step}" for name, step in _next_steps(fit, spec_file)))


def _next_steps(fit: Fit, spec_file: str) -> Iterator[tuple[str, str]]:
    run = f"assay run {shlex.quote(spec_file)}"
    unnamed = {}  # by task, what the spec says of its readout
    for task in fit.tasks:
        if task.task in fit.not_in_spec:
            question = "question: null, " if task.kind == "document" else ""
            name = task_of(task.task)
            path = task.readout if name == task.task else task.readout.rpartition("/")[0]
            unnamed[name] = f"{question}readout: {path}"
    for name, keys in unnamed.items():
        yield "next", f"in the spec, below task {name}: {keys}"
    yield ("then" if unnamed else "next"), run


def _gold(fit: Fit) -> Iterator[tuple[str, str]]:
    gold = fit.gold
    yield "gold", f"{gold.source}, {gold.documents:,} documents"
    if gold.repeated:
        yield "repeated", f"{gold.repeated:,} gold rows repeat another; each document counts once"
    yield from gold.disagreements
    for reason, documents in fit.left_out.items():
        yield "left out", f"{documents:,} documents: {reason}"
    yield "scores", f"of held-out rows in {fit.folds} folds, with 95 % intervals"


def _layers(task: TaskFit) -> Grid:
    several = len(task.layers[0].auroc_by_pooling) > 1
    both = [", ".join(task.layers[0].auroc_by_pooling)] if several else []
    states = f"; the last column is the AUROC of each state: {both[0]}" if several else ""
    rows = []
    for layer in task.layers:
        aurocs = (number(value).removeprefix("0") for value in layer.auroc_by_pooling.values())
        rows.append(
            (
                f"{'→ ' if layer.layer == task.layer else ''}{layer.layer}",
                f"{layer.seconds_per_document:.3f}",
                interval(layer.scores["auroc"]),
                interval(layer.scores["f1"]),
                number(layer.scores["ece"].value),
                f"{number(layer.loss)} ±{number(layer.loss_standard_error).removeprefix('0')}",
                *([", ".join(aurocs)] if several else []),
            )
        )
    names = ("layer", "s/doc", "AUROC", "macro F1", "ECE", "loss", *both)
    return Grid(f"{task.task}: {task.kind} readout{states}", names, rows, texts=0)


def _labels(name: str, labels: Sequence[TaskFit]) -> Grid:
    """The readouts of a task of kind `multi`: a row for each label."""
    rows = [
        (
            of.task.partition(".")[2],
            of.readout,
            str(of.layer),
            interval(of.scores["auroc"]),
            interval(of.scores["f1"]),
            number(of.scores["ece"].value),
            f"{of.labels[YES]:,}",
            f"{of.labels[NO]:,}",
        )
        for of in labels
    ]
    names = ("label", "readout", "layer", "AUROC", "macro F1", "ECE", "yes", "no")
    return Grid(f"{name}: a readout for each label, yes or no", names, rows, texts=2)


def _readout(fit: Fit, task: TaskFit) -> Iterator[tuple[str, str]]:
    state = "last token" if task.pooling == "last" else "mean of the document's tokens"
    yield "readout", f"{task.readout}: layer {task.layer}, {state}"
    if len(task.layers) > 1:
        best = min(task.layers, key=lambda layer: layer.loss)
        rule = f"of at most {number(task.loss_limit)}, the smallest plus one standard error"
        yield "layer", f"{task.layer} is the cheapest with a loss {rule} (layer {best.layer})"
    known = ((name, task.scores.get(key)) for key, name in _NAMES.items())
    shown = ", ".join(f"{name} {interval(figure)}" for name, figure in known if figure)
    yield "scores", f"{shown}: each row is scored by a fit that has not seen it"
    counts = ", ".join(f"{label} {rows:,}" for label, rows in task.labels.items())
    without = f"; {task.unlabelled:,} without a label for this task" if task.unlabelled else ""
    yield "rows", f"{task.rows:,}: {counts}{without}"
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


@printed
def show_thresholds(chosen: ChosenThresholds) -> Iterator[Part]:
    """The thresholds, what they promise, and how far the sample's documents go."""
    source, total = chosen.source, chosen.source["documents"]
    rows = {
        "file": chosen.path,
        "task": chosen.task,
        "sample": f"{total:,} documents, of which {source['positives']:,} are {chosen.positive}",
        "promise": f"recall {source['recall']:g} and precision {source['precision']:g} of "
        f"{chosen.positive}, compared with the last stage, with confidence "
        f"{source['confidence']:.2f}",
        f"p({chosen.positive})": f"a stage decides {_threshold(chosen.low, 'below')}, and "
        f"{_threshold(chosen.high, 'above')}",
    }
    if source["looks"] > 1:
        rows["promise"] += f": this is choice {source['looks']} from one sample, each with a risk"
    if chosen.fitted:
        rows["left out"] = f"{chosen.fitted:,} documents that a readout was fitted to"
    for stage, documents in enumerate(chosen.decided, 1):
        rows[f"stage {stage}"] = f"decides {documents:,} ({documents / total:.0%})"
    yield rows
    if not sum(chosen.decided[:-1]):
        yield from warnings([_UNDECIDED])


def _threshold(p: float, side: str) -> str:
    return f"at {p:.4f} or {side}" if 0 <= p <= 1 else f"no p {side} .5"
