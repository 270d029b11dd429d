"""Thresholds of a label's probability, and gold rows whose label is probably wrong.

Entry points: `choose_threshold`, `operating_points` and `find_label_issues`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.evaluation.intervals import Figure, effective_rows, wilson
from pipeline.evaluation.metrics import Bools, Floats, Ints
from pipeline.options import FOLDS

_SEED = 20_26
# Of float32 sums: a label's mean over equal probabilities may be above each of them.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class OperatingPoints:
    """The result of `score >= threshold` for every threshold with a different result, falling."""

    thresholds: Floats  # [points]
    hits: Floats  # [points]: positive rows at or above the threshold, or their weight
    flagged: Floats  # [points]: rows at or above the threshold
    positives: float
    rows: float

    @property
    def precision(self) -> Floats:  # [points]
        return self.hits / self.flagged

    @property
    def recall(self) -> Floats:  # [points]; NaN without a positive row
        return self.hits / self.positives if self.positives else np.full(len(self.hits), np.nan)


@dataclass(frozen=True, slots=True)
class Threshold:
    """A threshold, and what to expect of it on other rows."""

    threshold: float
    precision: Figure
    recall: Figure
    flagged: int  # rows at or above it


def operating_points(
    positive: Bools,  # [rows]
    score: Floats,  # [rows], 0 to 1
    weights: Floats | None = None,  # [rows]; default: all equal
) -> OperatingPoints:
    """A threshold half-way between any two neighbouring scores; the last one flags all rows."""
    mass = np.ones(len(score)) if weights is None else weights
    order = np.argsort(-score, kind="stable")
    ordered = score[order]
    last = np.flatnonzero(np.r_[ordered[1:] != ordered[:-1], True])  # of equal scores
    distinct = ordered[last]
    following = np.r_[distinct[1:], 0.0]
    return OperatingPoints(
        thresholds=(distinct + following) / 2,
        hits=np.cumsum(positive[order] * mass[order])[last],
        flagged=np.cumsum(mass[order])[last],
        positives=float(mass[positive].sum()),
        rows=float(mass.sum()),
    )


def choose_threshold(
    metric: Literal["precision", "recall"],
    least: float,
    positive: Bools,  # [rows]
    score: Floats,  # [rows], 0 to 1
    weights: Floats,  # [rows]
) -> Threshold | None:
    """The threshold with at least this precision or recall, and the best value of the other one.

    None if no threshold reaches it. A threshold is best on the rows that chose it. So its precision
    and recall are those of thresholds that other rows chose in the same way (cross-validation).
    """
    chosen = _best(operating_points(positive, score, weights), metric, least)
    if chosen is None:
        return None
    flagged = np.zeros(len(score), np.bool_)
    for rows, others in _folds(positive):
        of_others = _best(
            operating_points(positive[others], score[others], weights[others]), metric, least
        )
        if of_others is not None:
            flagged[rows] = score[rows] >= of_others
    return Threshold(
        chosen,
        precision=_share(positive, flagged, weights),
        recall=_share(flagged, positive, weights),
        flagged=int((score >= chosen).sum()),
    )


def _best(points: OperatingPoints, metric: str, least: float) -> float | None:
    """The threshold that reaches `least`, with the best value of the other metric."""
    metrics = {"precision": points.precision, "recall": points.recall}
    own = metrics.pop(metric)
    [other] = metrics.values()
    # — sums of weights are rounded
    candidates = np.flatnonzero(own >= least * (1 - 1e-12))
    if not points.positives or not len(candidates):
        return None
    best = candidates[np.lexsort((own[candidates], other[candidates]))[-1]]
    return float(points.thresholds[best])


def _folds(positive: Bools) -> Iterator[tuple[Ints, Ints]]:
    """The rows of each fold, and all others; positive rows are spread evenly."""
    order = np.random.default_rng(_SEED).permutation(len(positive))
    order = order[np.argsort(positive[order], kind="stable")]
    for fold in range(FOLDS):
        yield order[fold::FOLDS], np.delete(order, np.s_[fold::FOLDS])


def _share(part: Bools, whole: Bools, weights: Floats) -> Figure:
    """The share of `whole` that is in `part`, with Wilson's interval."""
    mass = weights[whole]
    if not len(mass):
        return Figure(None, None, None)
    share = float(np.average(part[whole], weights=mass))
    return Figure(share, *wilson(share, effective_rows(mass)))


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
