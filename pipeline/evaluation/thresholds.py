"""Where to cut a label's probability: every threshold there is, and the best for a wish.

Knows scores and which rows are positive. Knows nothing of labels' names or of other labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.evaluation.metrics import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class OperatingPoints:
    """What `score >= threshold` finds, for each threshold that finds something else; falling."""

    thresholds: Floats  # [points]
    hits: Ints  # [points]: positive rows that are found
    flagged: Ints  # [points]: rows that are found
    positives: int
    rows: int

    @property
    def precision(self) -> Floats:  # [points]
        return self.hits / self.flagged

    @property
    def recall(self) -> Floats:  # [points]; NaN without a positive row
        return self.hits / self.positives if self.positives else np.full(len(self.hits), np.nan)

    @property
    def false_positive_rate(self) -> Floats:  # [points]; NaN without a negative row
        negatives = self.rows - self.positives
        false = self.flagged - self.hits
        return false / negatives if negatives else np.full(len(self.hits), np.nan)


@dataclass(frozen=True, slots=True)
class Threshold:
    """A cut, and what it gives on the gold rows."""

    threshold: float
    precision: float
    recall: float
    flagged: int


def operating_points(
    positive: Bools,  # [rows]
    score: Floats,  # [rows], 0 to 1
) -> OperatingPoints:
    """Every cut between two neighbouring scores, half-way; the last finds all rows."""
    (rows,) = score.shape
    order = np.argsort(-score, kind="stable")
    ordered = score[order]
    last = np.flatnonzero(np.r_[ordered[1:] != ordered[:-1], True])  # of equal scores
    distinct = ordered[last]
    following = np.r_[distinct[1:], 0.0]
    return OperatingPoints(
        thresholds=(distinct + following) / 2,
        hits=np.cumsum(positive[order].astype(np.int64))[last],
        flagged=last + 1,
        positives=int(positive.sum()),
        rows=rows,
    )


def for_precision(points: OperatingPoints, wanted: float) -> Threshold | None:
    """The cut of the highest recall whose precision is at least as wanted; None if none is."""
    return _best(points, points.precision >= wanted, by=(points.recall, points.precision))


def for_recall(points: OperatingPoints, wanted: float) -> Threshold | None:
    """The cut of the highest precision whose recall is at least as wanted; None if none is."""
    return _best(points, points.recall >= wanted, by=(points.precision, points.recall))


def _best(
    points: OperatingPoints, allowed: Bools, *, by: tuple[Floats, Floats]
) -> Threshold | None:
    if not points.positives or not allowed.any():
        return None
    first, second = by
    candidates = np.flatnonzero(allowed)
    best = int(candidates[np.lexsort((second[candidates], first[candidates]))[-1]])
    return Threshold(
        float(points.thresholds[best]),
        float(points.precision[best]),
        float(points.recall[best]),
        int(points.flagged[best]),
    )


# Of float32 sums: a label's mean over equal probabilities may lie above each of them.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Mislabelled:
    """One suspected row, and the label that the answers point to."""

    row: int
    given: int
    likely: int
    p_given: float
    p_likely: float


def mislabelled(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]; not of a model that was fitted to these rows
) -> tuple[Mislabelled, ...]:
    """The suspected rows, by how much more likely the other label is: the surest first."""
    rows, labels = p.shape
    p_given = p[np.arange(rows), truth]
    thresholds = np.full(labels, np.inf)
    for label in np.unique(truth):
        thresholds[label] = p[truth == label, label].mean()
    reached = np.where(p >= thresholds - _ROUNDING, p, -1.0)
    likely = reached.argmax(axis=1)
    answered_otherwise = p.max(axis=1) > p_given
    suspected = np.flatnonzero((reached.max(axis=1) >= 0) & (likely != truth) & answered_otherwise)
    margin = p_given[suspected] - p[suspected, likely[suspected]]
    return tuple(
        Mislabelled(
            int(row),
            int(truth[row]),
            int(likely[row]),
            float(p_given[row]),
            float(p[row, likely[row]]),
        )
        for row in suspected[np.argsort(margin, kind="stable")]
    )
