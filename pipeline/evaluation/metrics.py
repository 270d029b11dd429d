"""Figures of how well probabilities agree with gold labels, for many resamples at once.

Every function takes `counts`: how often each row stands in each resample. All ones is the sample
itself, so that a figure and its interval come from the same formula. Knows numbers. Knows nothing
of what labels are called or where rows come from.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def once(rows: int) -> Floats:
    """[1, rows]: the sample itself as its only resample."""
    return np.ones((1, rows))


def confusion(
    truth: Ints,  # [rows]
    predicted: Ints,  # [rows]
    labels: int,
    counts: Floats,  # [resamples, rows]
) -> Floats:  # [resamples, labels of the gold, labels that were predicted]
    resamples, rows = counts.shape
    cells = np.zeros((rows, labels * labels))
    cells[np.arange(rows), truth * labels + predicted] = 1
    return (counts @ cells).reshape(resamples, labels, labels)


def accuracy(table: Floats) -> Floats:  # [resamples, labels, labels] -> [resamples]
    """The share of rows whose label is the gold's."""
    return _divided(np.trace(table, axis1=1, axis2=2), table.sum(axis=(1, 2)))


def precision(table: Floats) -> Floats:  # [resamples, labels, labels] -> [resamples, labels]
    """Of the rows predicted so, the share that is; NaN for a label that is never predicted."""
    return _divided(_hits(table), table.sum(axis=1))


def recall(table: Floats) -> Floats:  # [resamples, labels, labels] -> [resamples, labels]
    """Of the rows that are so, the share predicted so; NaN for a label that the gold lacks."""
    return _divided(_hits(table), table.sum(axis=2))


def f1(table: Floats) -> Floats:  # [resamples, labels, labels] -> [resamples, labels]
    """The harmonic mean of both; NaN for a label in neither gold nor predictions."""
    return _divided(2 * _hits(table), table.sum(axis=1) + table.sum(axis=2))


def ranked(
    positive: Bools,  # [rows]
    score: Floats,  # [rows]
    counts: Floats,  # [resamples, rows]
) -> tuple[Floats, Floats]:  # [resamples, distinct scores] each
    """Positive and negative rows at each distinct score, the scores rising."""
    order = np.argsort(score, kind="stable")
    ordered = score[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    weights = counts[:, order]
    hits = np.add.reduceat(weights * positive[order], starts, axis=1)
    return hits, np.add.reduceat(weights, starts, axis=1) - hits


def auroc(hits: Floats, misses: Floats) -> Floats:  # as `ranked` gives them -> [resamples]
    """The chance that a positive row scores above a negative one, ties half; NaN without both."""
    below = np.cumsum(misses, axis=1) - misses
    area = (hits * (below + misses / 2)).sum(axis=1)
    return _divided(area, hits.sum(axis=1) * misses.sum(axis=1))


def average_precision(hits: Floats, misses: Floats) -> Floats:  # as of `ranked` -> [resamples]
    """Precision at each threshold, weighted by the recall it adds; NaN without a positive row."""
    found = np.cumsum(hits[:, ::-1], axis=1)
    flagged = found + np.cumsum(misses[:, ::-1], axis=1)
    at_threshold = found / np.maximum(flagged, 1)
    return _divided((hits[:, ::-1] * at_threshold).sum(axis=1), found[:, -1])


def brier(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    counts: Floats,  # [resamples, rows]
) -> Floats:  # [resamples]
    """Mean squared error of p, summed over labels; of two labels, one: the other is its mirror."""
    errors: Floats = ((p - np.eye(p.shape[1])[truth]) ** 2).sum(axis=1)  # [rows]
    per_row = errors / 2 if p.shape[1] == 2 else errors
    return _divided(counts @ per_row, counts.sum(axis=1))


def mean_defined(values: Floats) -> Floats:  # [resamples, labels] -> [resamples]
    """The mean over the labels for which there is a value; NaN where there is none."""
    defined = ~np.isnan(values)
    return _divided(np.where(defined, values, 0).sum(axis=1), defined.sum(axis=1))


def _hits(table: Floats) -> Floats:
    return np.diagonal(table, axis1=1, axis2=2)


def _divided(a: Floats, b: Floats) -> Floats:
    """a / b; NaN where b is 0."""
    quotient: Floats = np.divide(a, b, out=np.full(a.shape, np.nan), where=b > 0)
    return quotient
