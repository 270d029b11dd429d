"""Thresholds of a label's probability, and gold rows whose label is probably wrong.

Entry points: `choose_threshold` and `find_label_issues`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from sklearn.metrics import precision_recall_curve

from pipeline.evaluation.intervals import Figure, wilson
from pipeline.evaluation.resampling import Bools, Floats, Ints, folds
from pipeline.options import FOLDS

_SEED = 20_26
# Tolerance of float32 sums: the mean of equal probabilities may be above each of them.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Threshold:
    """A threshold, and what to expect of it on other rows."""

    threshold: float
    precision: Figure
    recall: Figure
    flagged: int  # rows at or above it


def choose_threshold(
    metric: Literal["precision", "recall"],
    least: float,
    positive: Bools,  # [rows]
    score: Floats,  # [rows], 0 to 1
) -> Threshold | None:
    """The threshold with at least this precision or recall, and the best value of the other one.

    None if no threshold reaches it. A threshold looks best on the rows that it was chosen from. So
    its precision and recall are those of thresholds that were chosen in the same way from other
    rows (cross-validation).
    """
    chosen = _best(metric, least, positive, score)
    if chosen is None:
        return None
    flagged = np.zeros(len(score), np.bool_)
    every_row = np.arange(len(score))  # — each row is a group
    for split in folds(positive.astype(np.int64), every_row, number=FOLDS, seed=_SEED):
        others, rows = split.fitted, split.held_out
        of_others = _best(metric, least, positive[others], score[others])
        if of_others is not None:
            flagged[rows] = score[rows] >= of_others
    return Threshold(
        chosen,
        precision=_share(positive, flagged),
        recall=_share(flagged, positive),
        flagged=int((score >= chosen).sum()),
    )


def _best(metric: str, least: float, positive: Bools, score: Floats) -> float | None:
    """The threshold that reaches `least`, with the best value of the other metric.

    It is half-way between two neighbouring scores; the lowest one flags all rows.
    """
    if not positive.any():
        return None
    precision, recall, scores = precision_recall_curve(positive, score)
    # — the curve ends with a point without a threshold
    metrics = {"precision": precision[:-1], "recall": recall[:-1]}
    own = metrics.pop(metric)
    [other] = metrics.values()
    candidates = np.flatnonzero(own >= least)
    if not len(candidates):
        return None
    best = candidates[np.lexsort((own[candidates], other[candidates]))[-1]]
    return float((scores[best] + (scores[best - 1] if best else 0.0)) / 2)


def _share(part: Bools, whole: Bools) -> Figure:
    """The share of `whole` that is in `part`, with Wilson's interval."""
    if not whole.any():
        return Figure(None, None, None)
    share = float(part[whole].mean())
    return Figure(share, *wilson(share, int(whole.sum())))


def find_label_issues(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
) -> tuple[Ints, Ints]:  # [issues] each
    """The rows whose gold label is probably wrong, and their likely labels.

    The most certain issue comes first. `p` must be of a model that was not fitted to these rows.

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
