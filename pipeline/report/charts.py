"""The charts of a page: scores of a corpus, and curves of an evaluation. `page.html` draws them.

Entry points: `histograms`, `score_histogram` and `curves`. A chart is as wide as a telephone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.evaluation.metrics import Bin
from pipeline.evaluation.operating_points import operating_points
from pipeline.filters.tally import ScoreCounts
from pipeline.gold.answers import JudgedRows
from pipeline.report.console import truncate
from pipeline.verbs.corpus_report import ExpectedScores
from pipeline.verbs.evaluate import TaskEvaluation

MOST_FIGURES = 3  # of a task
LEAST_SHARE = 0.01  # of the documents of a figure, above the lowest bar
MAX_LINES = 5  # labels of a chart: those with the most gold rows
LABEL_CHARS = 40
LEAST_ROWS = 20  # of each point of the reliability diagram except the last
_POINTS = 200  # of a curve: more are not visible
_LOG_BELOW_ONE = 0.3  # the axis begins below 1, so that a bar of one document has a height
_LOW, _HIGH = 130, 280  # pixels

Ticks = Sequence[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class Line:
    """A curve of a chart; each label has its own color."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with bars or lines. Places are from 0 to 1, from the left and from below."""

    name: str
    height: int  # pixels of the plot
    y: Ticks
    x: Ticks = ((0, "0"), (0.5, "0.5"), (1, "1"))
    axes: tuple[str, str] = ("", "")  # names
    bars: Sequence[tuple[float, float, str]] = ()  # left end, height, words
    lines: Sequence[Line] = ()
    diagonal: bool = False
    caption: str = ""


def histograms(scores: Sequence[ScoreCounts], kind: str = "choice") -> list[Chart]:
    """The charts of a task: of two labels the first, else the labels with most to show.

    Of kind `multi`, the second of two labels has a chart of its own. A label has something to show
    if one document in a hundred scores above the lowest bar.
    """
    # — of two labels the second mirrors the first
    candidates = scores[:1] if len(scores) == 2 and kind != "multi" else scores
    above = [sum(score.counts[1:]) for score in candidates]
    most = sorted(range(len(candidates)), key=lambda n: -above[n])[:MOST_FIGURES]
    return [
        histogram(candidates[n])
        for n in sorted(most)
        if above[n] >= LEAST_SHARE * max(1, sum(candidates[n].counts))
    ]


def histogram(score: ScoreCounts) -> Chart:
    """The documents by the probability of a label."""
    name = f"p of {score.label} ({score.task}), {sum(score.counts):,} documents"
    return _histogram(name, score.counts, (0, 1))


def score_histogram(task: str, scores: ExpectedScores) -> Chart:
    """The documents by the expected value of a score."""
    name = f"{task}: expected score, {sum(scores.counts):,} documents"
    return _histogram(name, scores.counts, (scores.low, scores.high))


def _histogram(name: str, bars: Sequence[int], ends: tuple[float, float]) -> Chart:
    """Bars of equal width on a logarithmic axis, so that a bar of one document is visible."""
    decades = max(1, len(str(max(bars))) - (str(max(bars)).strip("0") == "1"))
    low, width = ends[0], ends[1] - ends[0]

    def height(count: int) -> float:
        return (math.log10(count) + _LOG_BELOW_ONE) / (decades + _LOG_BELOW_ONE)

    def words(bar: int) -> str:
        first, last = (low + width * (bar + n) / len(bars) for n in (0, 1))
        return f"{first:.2f} to {last:.2f}"

    highest = max(range(len(bars)), key=bars.__getitem__)
    return Chart(
        name,
        _LOW,
        # — a longer number has no room beside the chart
        [
            (height(10**n), f"{10**n:,}" if n < 6 else f"{10 ** (n - 6):,}M")
            for n in range(decades + 1)
        ],
        x=[(share, f"{low + width * share:g}") for share in (0, 0.5, 1)],
        bars=[
            (bar / len(bars), height(count), f"{words(bar)}: {count:,}")
            for bar, count in enumerate(bars)
            if count
        ],
        caption=f"{name}; the highest bar has {bars[highest]:,} at {words(highest)}; "
        "logarithmic scale",
    )


def curves(task: TaskEvaluation) -> list[Chart]:
    """The reliability of the answers, and precision by recall of the most frequent labels."""
    if task.scores is None or task.judged is None:
        return []
    ticks = [(share, f"{share:g}") for share in (0, 0.25, 0.5, 0.75, 1)]
    bins = merged_bins(task.scores.reliability)
    name = f"{len(bins)} groups of documents, by confidence"
    reliability = Line(name, [(part.confidence, part.accuracy) for part in bins], 0)
    return [
        Chart(
            f"{task.task}: reliability",
            _HIGH,
            ticks,
            axes=("confidence: p of the answer", "share of correct answers"),
            lines=[reliability],
            diagonal=True,
        ),
        Chart(
            f"{task.task}: precision and recall",
            _HIGH,
            ticks,
            axes=("recall", "precision"),
            lines=list(_precision_by_recall(task.labels, task.judged)),
        ),
    ]


def merged_bins(bins: Sequence[Bin]) -> list[Bin]:
    """Neighbouring bins as one where they have few rows: the share of a few rows is an accident."""
    merged: list[Bin] = []
    for bin in bins:
        if merged and merged[-1].rows < LEAST_ROWS:
            before = merged.pop()
            rows = before.rows + bin.rows
            share = bin.rows / rows
            confidence = before.confidence + share * (bin.confidence - before.confidence)
            bin = Bin(rows, confidence, before.accuracy + share * (bin.accuracy - before.accuracy))
        merged.append(bin)
    return merged


def _precision_by_recall(labels: Sequence[str], judged: JudgedRows) -> Iterator[Line]:
    """A line for each label; of two labels the second mirrors the first."""
    support = np.bincount(judged.truth, minlength=len(labels))
    most = np.argsort(-support, kind="stable")[:MAX_LINES].tolist()
    for color, label in enumerate([0] if len(labels) == 2 else most):
        positive = judged.truth == label
        if positive.all() or not positive.any():
            continue
        points = operating_points(positive, judged.p[:, label])
        # — evenly spaced, with the last one
        count = len(points.recall)
        kept = np.unique(np.linspace(0, count - 1, min(count, _POINTS)).astype(np.int64))
        recall, precision = points.recall[kept], points.precision[kept]
        # — between two thresholds precision is constant: a step
        ends = np.stack([np.r_[0, recall[:-1]], recall], axis=1).ravel().tolist()
        steps = list(zip(ends, precision.repeat(2).tolist(), strict=True))
        yield Line(truncate(labels[label], LABEL_CHARS), steps, color)
