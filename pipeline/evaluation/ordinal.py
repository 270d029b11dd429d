"""Figures of a score, whose labels are numbers in rising order. Entry point: `ordinal_figures`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.intervals import Figure, interval
from pipeline.evaluation.resampling import draws

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ORDINAL_HEADLINES = ("qwk", "mae", "spearman")
_SEED = 20_26
_NO_SPREAD = 1e-12  # of equal numbers: rounding


def ordinal_figures(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    values: Sequence[float],  # [labels]: rising
    *,
    resamples: int,
) -> Mapping[str, Figure]:
    """ORDINAL_HEADLINES of at least one row, with 95 % intervals from a bootstrap.

    `qwk` is the kappa of Cohen ("Weighted kappa", Psychological Bulletin 1968) between the gold
    numbers and the likeliest ones, with squared distances as weights. `mae` is the mean absolute
    error of the expected value, and `spearman` its rank correlation with the gold numbers.
    """
    rows, _ = p.shape
    numbers = np.array(values, np.float64)
    gold, likeliest, expected = numbers[truth], numbers[p.argmax(axis=1)], p @ numbers
    counts = draws(np.random.default_rng(_SEED), resamples, rows)
    # — the first line is the sample itself
    counts = np.concatenate([np.ones((1, rows)), counts])
    figures = {
        "qwk": (kappas(gold, likeliest, counts), -1.0, 1.0),
        "mae": (counts @ np.abs(expected - gold) / counts.sum(axis=1), 0.0, float(np.ptp(numbers))),
        "spearman": (rank_correlations(gold, expected, counts), -1.0, 1.0),
    }
    return {name: _figure(*figure, rows=rows) for name, figure in figures.items()}


def _figure(measured: Floats, low: float, high: float, *, rows: float) -> Figure:
    """The first of the values, which are from `low` to `high`, and its interval by the others."""
    shares = (measured - low) / (high - low)
    figure = interval(float(shares[0]), shares[1:], rows=rows, rarest=rows)
    ends = (figure.value, figure.low, figure.high)
    return Figure(*(None if end is None else low + (high - low) * end for end in ends))


def kappas(
    gold: Floats,  # [rows]
    predicted: Floats,  # [rows]
    counts: Floats,  # [resamples, rows]: how often a row is in a resample
) -> Floats:  # [resamples]
    """Cohen's kappa with squared distances as weights; NaN if all numbers are equal.

    The mean squared distance of independent numbers x and y is E[x²] + E[y²] - 2 E[x] E[y].
    """
    total = counts.sum(axis=1)
    observed, x, y, xx, yy = (
        counts @ each / total
        for each in ((gold - predicted) ** 2, gold, predicted, gold**2, predicted**2)
    )
    chance = xx + yy - 2 * x * y
    empty = np.full(len(chance), np.nan)
    ratio = np.divide(observed, chance, out=empty, where=chance > _NO_SPREAD * (xx + yy))
    return np.asarray(1 - ratio, np.float64)


def rank_correlations(
    a: Floats,  # [rows]
    b: Floats,  # [rows]
    counts: Floats,  # [resamples, rows]
) -> Floats:  # [resamples]
    """Spearman's rank correlation; NaN if all ranks of one side are equal."""
    total = counts.sum(axis=1)
    ranks = [_ranks(values, counts) for values in (a, b)]
    x, y = (rank - ((counts * rank).sum(axis=1) / total)[:, None] for rank in ranks)
    covariance, x_variance, y_variance = (
        (counts * product).sum(axis=1) for product in (x * y, x * x, y * y)
    )
    scale = np.sqrt(x_variance * y_variance)
    empty = np.full(len(scale), np.nan)
    some = scale > _NO_SPREAD * total**3
    return np.asarray(np.divide(covariance, scale, out=empty, where=some), np.float64)


def _ranks(values: Floats, counts: Floats) -> Floats:  # [rows], [resamples, rows] -> counts' shape
    """The rank of each row in each resample; equal values share the mean of their ranks."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]]
    sizes = np.add.reduceat(counts[:, order], np.flatnonzero(first), axis=1)
    of_value = sizes.cumsum(axis=1) - sizes / 2
    ranks = np.empty_like(counts)
    ranks[:, order] = of_value[:, first.cumsum() - 1]
    return ranks
