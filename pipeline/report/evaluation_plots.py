"""The plots of an evaluation, as SVG. Entry point: `plots`.

A chart is as wide as a telephone, so that its words can be read there. Labels are
drawn as text, never as markup.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray

from pipeline.evaluation.metrics import Floats
from pipeline.evaluation.thresholds import OperatingPoints, operating_points
from pipeline.report.console import truncate
from pipeline.verbs.evaluate import TaskEvaluation, VersionScores

LABEL_CHARS = 18
# More lines or panels are hard to distinguish: the labels with the most gold rows are drawn.
MAX_LINES = 10
MAX_PANELS = 12
MAX_CONFUSED = 40  # labels of the confusion matrix: those with the most gold rows
MAX_NAMED = 24  # labels; the cells of more are too small for numbers
_LINE_STYLES = ("-", "--")  # raw, calibrated
_POINTS = 400  # of a curve: more are not visible
_WIDTH = 3.9  # inches: one chart fills the screen of a phone; three fit side by side on a desktop
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a label may hold dollar signs
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.fontsize": 9,
    "legend.frameon": False,
}

_name = partial(truncate, chars=LABEL_CHARS)


def svg(draw: Callable[[Figure], None], *, width: float, height: float, salt: str) -> str:
    """The SVG that `draw` draws; sizes in inches. `salt` makes the ids of a page's plots unique."""
    style: Any = {**_STYLE, "svg.hashsalt": salt}
    with rc_context(style), warnings.catch_warnings():
        # — matplotlib measures text with its own font; the reader's font may have the glyph
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        figure = Figure(figsize=(width, height), layout=layout)
        draw(figure)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    text = written.getvalue()
    return text[text.index("<svg") :]


@dataclass(frozen=True, slots=True)
class Plots:
    """Charts under one title. A wide one keeps its size, and is scrolled on a narrow screen."""

    title: str
    svgs: tuple[str, ...]
    wide: bool = False


def plots(task: TaskEvaluation) -> Iterator[Plots]:
    """The charts of one task."""
    # — of two labels the second mirrors the first
    shown = (
        [0] if len(task.labels) == 2 else _most_frequent(task, len(np.unique(_first(task).truth)))
    )
    curves = [
        partial(_reliability, task=task),
        partial(_precision_recall, task=task, shown=shown[:MAX_LINES]),
        partial(_roc, task=task, shown=shown[:MAX_LINES]),
    ]
    lines = len(shown[:MAX_LINES]) * len(task.versions)
    height = _WIDTH + 0.2 * -(-lines // 2)
    yield Plots(
        "Reliability, precision and recall, ROC",
        tuple(_one(draw, height, f"{task.task} c{n}") for n, draw in enumerate(curves)),
    )
    yield _confusion_plot(task)
    panels = [partial(_probabilities, task=task, label=label) for label in shown[:MAX_PANELS]]
    yield Plots(
        "Probabilities by gold label",
        tuple(_one(draw, 3.2, f"{task.task} h{n}") for n, draw in enumerate(panels)),
    )


def _one(draw: Callable[[Axes], None], height: float, salt: str) -> str:
    """The SVG of one chart."""
    return svg(lambda figure: draw(figure.subplots()), width=_WIDTH, height=height, salt=salt)


def _confusion_plot(task: TaskEvaluation) -> Plots:
    confused = sorted(_most_frequent(task, MAX_CONFUSED))
    title = "Confusion: a darker cell has a larger share of the gold label's documents"
    if len(confused) < len(task.labels):
        title += f" (the {MAX_CONFUSED} most frequent of {len(task.labels):,} labels)"
    side = min(12.0, 2.8 + 0.55 * len(confused))
    matrix = partial(_confusion, task=task, shown=confused)
    drawn = svg(matrix, width=side + 0.6, height=side, salt=f"{task.task} m")
    return Plots(title, (drawn,), wide=side > _WIDTH)


def _first(task: TaskEvaluation) -> VersionScores:
    return next(iter(task.versions.values()))


def _most_frequent(task: TaskEvaluation, most: int) -> list[int]:
    support = np.bincount(_first(task).truth, minlength=len(task.labels))
    return [int(label) for label in np.argsort(-support, kind="stable")[:most]]


def _precision_recall(axes: Axes, task: TaskEvaluation, shown: Sequence[int]) -> None:
    _square(axes, "recall", "precision")
    for points, kept, look in _lines(task, shown):
        recall, of_label = points.recall[kept], points.precision[kept]
        # — between two thresholds precision is constant: a step
        axes.step(np.r_[0, recall], np.r_[of_label[0], of_label], where="pre", **look)
    _legend_below(axes)


def _roc(axes: Axes, task: TaskEvaluation, shown: Sequence[int]) -> None:
    _square(axes, "false positive rate", "true positive rate")
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle=":")
    for points, kept, look in _lines(task, shown):
        axes.plot(np.r_[0, points.false_positive_rate[kept]], np.r_[0, points.recall[kept]], **look)
    _legend_below(axes)


def _legend_below(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)


def _lines(
    task: TaskEvaluation, shown: Sequence[int]
) -> Iterator[tuple[OperatingPoints, NDArray[np.int64], dict[str, Any]]]:
    """The points of each version and label, the indices of those that are drawn, and the style."""
    for number, (version, scored) in enumerate(task.versions.items()):
        for label in shown:
            points = operating_points(scored.truth == label, scored.p[:, label], scored.weights)
            if not 0 < points.positives < points.rows:
                continue
            name = _name(task.labels[label])
            if len(task.versions) > 1:
                name = f"{name}, {version}"
            color = f"C{shown.index(label) if len(shown) > 1 else number}"
            look = {"color": color, "linestyle": _LINE_STYLES[number], "label": name}
            # — evenly spaced, with the last one
            count = len(points.hits)
            kept = np.unique(np.linspace(0, count - 1, min(count, _POINTS)).astype(np.int64))
            yield points, kept, look


def _reliability(axes: Axes, task: TaskEvaluation) -> None:
    _square(axes, "confidence: p of the answer", "share of correct answers")
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle=":", label="perfectly calibrated")
    for style, (version, scored) in zip(_LINE_STYLES, task.versions.items(), strict=False):
        bins = scored.scores.reliability
        axes.plot(
            [each.confidence for each in bins],
            [each.accuracy for each in bins],
            marker="o",
            markersize=4,
            linestyle=style,
            label=f"{version}, {len(bins)} bins of about equal mass",
        )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17))


def _confusion(figure: Figure, task: TaskEvaluation, shown: Sequence[int]) -> None:
    every = np.array(_first(task).scores.confusion)
    counts = every[np.ix_(shown, shown)]
    # — of all documents of the gold label, also those with an answer that is not shown
    shares = counts / np.maximum(every.sum(axis=1)[shown, None], 1)
    axes = figure.subplots()
    # — drawn cells: the page allows no images
    axes.pcolormesh(shares, cmap="Blues", vmin=0, vmax=1)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.grid(False)
    names = [_name(task.labels[label]) for label in shown]
    middles = np.arange(len(names)) + 0.5
    axes.set_xticks(middles, names, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(middles, names)
    axes.set_xlabel("answer (raw)")
    axes.set_ylabel("gold")
    many = len(names) > MAX_NAMED
    axes.tick_params(labelsize=6 if many else 11)
    for (row, column), count in () if many else np.ndenumerate(counts):
        dark = shares[row, column] > 0.5
        color = "white" if dark else "0.2"
        axes.text(column + 0.5, row + 0.5, f"{count:,}", ha="center", va="center", color=color)


def _probabilities(axes: Axes, task: TaskEvaluation, label: int) -> None:
    version, scored = list(task.versions.items())[-1]
    which = f" ({version})" if len(task.versions) > 1 else ""
    name = _name(task.labels[label])
    other = _name(task.labels[1]) if len(task.labels) == 2 else "another"
    is_it = scored.truth == label
    _histogram(axes, scored.p[is_it, label], f"gold: {name}", "C3")
    _histogram(axes, scored.p[~is_it, label], f"gold: {other}", "C0")
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"p of {name}{which}")
    axes.set_ylabel("share of documents")
    axes.legend(loc="best")


def _histogram(axes: Axes, p: Floats, name: str, color: str) -> None:
    # — shares, because the counts of a rare label would be invisible
    weights = np.full(len(p), 1 / max(1, len(p)))
    edges = np.linspace(0, 1, 31).tolist()
    axes.hist(p, edges, weights=weights, alpha=0.55, color=color, label=f"{name}, {len(p):,}")


def _square(axes: Axes, x: str, y: str) -> None:
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_aspect("equal")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
