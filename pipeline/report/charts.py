"""The histograms of a page, which `page.html` draws. A chart is as wide as a telephone.

Entry points: `histograms` and `score_histogram`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.verbs.corpus_report import ExpectedScores, ScoreCounts

MOST_FIGURES = 3  # of a task
LEAST_SHARE = 0.01  # of the documents of a figure, above the lowest bar
_LOG_BELOW_ONE = 0.3  # the axis begins below 1, so that a bar of one document has a height
HEIGHT = 130  # pixels of the plot

Ticks = Sequence[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A histogram. Places are from 0 to 1, from the left and from below."""

    name: str
    caption: str
    x: Ticks
    y: Ticks
    bars: Sequence[tuple[float, float, str]]  # left end, height, words


def histograms(scores: Sequence[ScoreCounts], kind: str = "choice") -> list[Chart]:
    """The charts of a task: of two labels the first, else the labels with the most documents above
    the lowest bar.

    Of kind `multi`, the second of two labels has a chart of its own. A label has a chart if one
    document in a hundred scores above the lowest bar.
    """
    # — of two labels the second mirrors the first
    candidates = scores[:1] if len(scores) == 2 and kind != "multi" else scores
    above_lowest = [sum(score.counts[1:]) for score in candidates]
    most = sorted(range(len(candidates)), key=lambda n: -above_lowest[n])[:MOST_FIGURES]
    return [
        histogram(candidates[n])
        for n in sorted(most)
        if above_lowest[n] >= LEAST_SHARE * max(1, sum(candidates[n].counts))
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
        caption=f"{name}; the highest bar has {bars[highest]:,} at {words(highest)}; "
        "logarithmic scale",
        x=[(share, f"{low + width * share:g}") for share in (0, 0.5, 1)],
        # — a longer number has no room beside the chart
        y=[
            (height(10**n), f"{10**n:,}" if n < 6 else f"{10 ** (n - 6):,}M")
            for n in range(decades + 1)
        ],
        bars=[
            (bar / len(bars), height(count), f"{words(bar)}: {count:,}")
            for bar, count in enumerate(bars)
            if count
        ],
    )
