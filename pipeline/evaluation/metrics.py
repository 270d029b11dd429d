"""Figures of how well probabilities agree with gold labels, for many resamples at once.

Every function takes `counts`: how often each row stands in each resample. All ones is the sample
itself, so that a figure and its interval come from the same formula. Knows numbers. Knows nothing
of what labels are called or where rows come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def once(rows: int) -> Floats:
    """[1, rows]: the sample itself as its only resample."""
    return np.ones((1, rows))


@dataclass(frozen=True, slots=True)
class Sums:
    """What precision and recall are made of: rows of each label, [resamples, labels] each."""

    hits: Floats  # both say it
    predicted: Floats
    support: Floats  # the gold says it


def sums(
    truth: Ints,  # [rows]
    predicted: Ints,  # [rows]
    labels: int,
    counts: Floats,  # [resamples, rows]
) -> Sums:
    right = truth == predicted
    return Sums(
        hits=_summed(truth[right], labels, counts[:, right]),
        predicted=_summed(predicted, labels, counts),
        support=_summed(truth, labels, counts),
    )


def confusion(
    truth: Ints,  # [rows]
    predicted: Ints,  # [rows]
    labels: int,
) -> Ints:  # [labels of the gold, labels that were predicted]
    cells = np.bincount(truth * labels + predicted, minlength=labels * labels)
    return cells.reshape(labels, labels)


def accuracy(of: Sums) -> Floats:  # [resamples]
    """The share of rows whose label is the gold's."""
    return _divided(of.hits.sum(axis=1), of.support.sum(axis=1))


def precision(of: Sums) -> Floats:  # [resamples, labels]
    """Of the rows predicted so, the share that is; NaN for a label that is never predicted."""
    return _divided(of.hits, of.predicted)


def recall(of: Sums) -> Floats:  # [resamples, labels]
    """Of the rows that are so, the share predicted so; NaN for a label that the gold lacks."""
    return _divided(of.hits, of.support)


def f1(of: Sums) -> Floats:  # [resamples, labels]
    """The harmonic mean of both; NaN for a label in neither gold nor predictions."""
    return _divided(2 * of.hits, of.predicted + of.support)


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
    apart = p.copy()  # [rows, labels]
    apart[np.arange(len(p)), truth] -= 1
    errors: Floats = (apart**2).sum(axis=1)  # [rows]
    per_row = errors / 2 if p.shape[1] == 2 else errors
    return _divided(counts @ per_row, counts.sum(axis=1))


def mean_defined(values: Floats) -> Floats:  # [resamples, labels] -> [resamples]
    """The mean over the labels for which there is a value; NaN where there is none."""
    defined = ~np.isnan(values)
    return _divided(np.where(defined, values, 0).sum(axis=1), defined.sum(axis=1))


def _summed(label: Ints, labels: int, counts: Floats) -> Floats:
    """[rows] and [resamples, rows] -> [resamples, labels]: how often rows of each label stand."""
    resamples = len(counts)
    cells = label + labels * np.arange(resamples)[:, None]  # [resamples, rows]
    cells_summed = np.bincount(cells.ravel(), counts.ravel(), minlength=resamples * labels)
    summed: Floats = cells_summed.reshape(resamples, labels).astype(np.float64, copy=False)
    return summed


def _divided(a: Floats, b: Floats) -> Floats:
    """a / b; NaN where b is 0."""
    quotient: Floats = np.divide(a, b, out=np.full(a.shape, np.nan), where=b > 0)
    return quotient


BINS = 15


@dataclass(frozen=True, slots=True)
class Bin:
    """Rows that are about equally sure, and how many of them are right."""

    rows: int
    confidence: float  # mean
    accuracy: float


def confidence_and_hits(truth: Ints, p: Floats) -> tuple[Floats, Bools]:
    """[rows] each: the chosen label's probability, and whether it is the gold's."""
    rows, _ = p.shape
    chosen = p.argmax(axis=1)
    return p[np.arange(rows), chosen], chosen == truth


def expected_calibration_error(
    confidence: Floats,  # [rows]
    hits: Bools,  # [rows]
    counts: Floats,  # [resamples, rows]
) -> Floats:  # [resamples]
    """|accuracy - confidence|, averaged over bins by their rows."""
    order = np.argsort(confidence, kind="stable")
    weights = counts[:, order]
    bins = _bins(confidence[order], weights)
    excess = _summed_bins(bins, weights * (hits - confidence)[order])
    error: Floats = np.abs(excess).sum(axis=1) / counts.sum(axis=1)
    return error


def reliability_curve(confidence: Floats, hits: Bools) -> tuple[Bin, ...]:
    """The bins that hold rows, the least confident first."""
    order = np.argsort(confidence, kind="stable")
    weights = once(len(order))
    bins = _bins(confidence[order], weights)
    columns = (weights, confidence[order][None], hits[order][None].astype(np.float64))
    rows, sure, right = (_summed_bins(bins, values)[0] for values in columns)
    return tuple(
        Bin(int(n), float(s / n), float(r / n))
        for n, s, r in zip(rows, sure, right, strict=True)
        if n
    )


def _bins(
    ordered: Floats,  # [rows], rising
    weights: Floats,  # [resamples, rows]
) -> Ints:  # [resamples, rows]
    """Each row's bin in each resample."""
    first = np.searchsorted(ordered, ordered, side="left")  # of the equally confident
    below = (np.cumsum(weights, axis=1) - weights)[:, first]
    of_row = (below * BINS // weights.sum(axis=1, keepdims=True)).astype(np.int64)
    # — a row that a resample lacks may lie behind all others
    bins: Ints = np.minimum(of_row, BINS - 1)
    return bins


def _summed_bins(bins: Ints, values: Floats) -> Floats:  # [resamples, rows] -> [resamples, bins]
    resamples, _ = bins.shape
    cells = bins + BINS * np.arange(resamples)[:, None]
    sums = np.bincount(cells.ravel(), values.ravel(), minlength=resamples * BINS)
    return sums.astype(np.float64).reshape(resamples, BINS)
