"""How far stated probabilities are from observed frequencies.

Confidence is the probability of the label that was chosen. Bins are of equal mass: a row's bin is
given by the share of rows that are less confident than it, so equal confidences stay together.
Knows numbers. Knows nothing of labels' names, and changes no probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.evaluation.metrics import Bools, Floats, Ints, once

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
    excess = _summed(bins, weights * (hits - confidence)[order])
    error: Floats = np.abs(excess).sum(axis=1) / counts.sum(axis=1)
    return error


def reliability_curve(confidence: Floats, hits: Bools) -> tuple[Bin, ...]:
    """The bins that hold rows, the least confident first."""
    order = np.argsort(confidence, kind="stable")
    weights = once(len(order))
    bins = _bins(confidence[order], weights)
    columns = (weights, confidence[order][None], hits[order][None].astype(np.float64))
    rows, sure, right = (_summed(bins, values)[0] for values in columns)
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


def _summed(bins: Ints, values: Floats) -> Floats:  # [resamples, rows] -> [resamples, bins]
    resamples, _ = bins.shape
    cells = bins + BINS * np.arange(resamples)[:, None]
    sums = np.bincount(cells.ravel(), values.ravel(), minlength=resamples * BINS)
    return sums.astype(np.float64).reshape(resamples, BINS)
