"""Thresholds of a label's probability, and gold rows whose label is probably wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.evaluation.metrics import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class OperatingPoints:
    """The result of `score >= threshold` for every threshold with a different result, falling."""

    thresholds: Floats  # [points]
    hits: Ints  # [points]: positive rows at or above the threshold
    flagged: Ints  # [points]: rows at or above the threshold
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
    """A threshold, and its precision and recall on the gold rows."""

    threshold: float
    precision: float
    recall: float
    flagged: int


def operating_points(
    positive: Bools,  # [rows]
    score: Floats,  # [rows], 0 to 1
) -> OperatingPoints:
    """A threshold half-way between any two neighbouring scores; the last one flags all rows."""
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


def for_precision(points: OperatingPoints, least: float) -> Threshold | None:
    """The threshold of the highest recall with a precision of `least` or more, if there is one."""
    return _best(points, points.precision >= least, points.recall, points.precision)


def for_recall(points: OperatingPoints, least: float) -> Threshold | None:
    """The threshold of the highest precision with a recall of `least` or more, if there is one."""
    return _best(points, points.recall >= least, points.precision, points.recall)


def _best(
    points: OperatingPoints, allowed: Bools, first: Floats, second: Floats
) -> Threshold | None:
    if not points.positives or not allowed.any():
        return None
    candidates = np.flatnonzero(allowed)
    best = int(candidates[np.lexsort((second[candidates], first[candidates]))[-1]])
    return Threshold(
        float(points.thresholds[best]),
        float(points.precision[best]),
        float(points.recall[best]),
        int(points.flagged[best]),
    )


# Of float32 sums: a label's mean over equal probabilities may be above each of them.
_ROUNDING = 1e-6


def find_label_issues(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
) -> tuple[Ints, Ints]:  # [issues] each
    """The rows whose gold label is probably wrong, and their likely labels.

    The surest issue comes first. `p` is not of a model that was fitted to these rows.

    Confident learning (Northcutt et al. 2021): a label's threshold is the mean probability that it
    gets from rows with this gold label. A row's likely label is the most probable one that reaches
    its threshold. The row is an issue if neither this label nor the answer is the gold label.
    """
    rows, labels = p.shape
    p_gold = p[np.arange(rows), truth]
    thresholds = np.full(labels, np.inf)
    for label in np.unique(truth):
        thresholds[label] = p[truth == label, label].mean()
    reached = np.where(p >= thresholds - _ROUNDING, p, -1.0)
    likely = reached.argmax(axis=1)
    answered_otherwise = p.max(axis=1) > p_gold
    issues = np.flatnonzero((reached.max(axis=1) >= 0) & (likely != truth) & answered_otherwise)
    margin = p_gold[issues] - p[issues, likely[issues]]
    ordered = issues[np.argsort(margin, kind="stable")]
    return ordered, likely[ordered]
