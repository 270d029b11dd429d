"""Figures of a score, whose labels are numbers in rising order. Entry point: `ordinal_figures`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.evaluation.intervals import Figure, interval
from pipeline.evaluation.resampling import Floats, Ints

ORDINAL_HEADLINES = ("qwk", "mae", "spearman")
_NO_SPREAD = 1e-12  # of equal numbers: rounding


def ordinal_figures(
    measured: Mapping[str, Floats],  # [1 + resamples] each, of `ordinal_metrics`
    values: Sequence[float],  # [labels]: rising
    rows: int,
) -> dict[str, Figure]:
    """ORDINAL_HEADLINES of at least one row, with 95 % intervals from a bootstrap.

    `qwk` is the kappa of Cohen ("Weighted kappa", Psychological Bulletin 1968) between the gold
    numbers and the likeliest ones, with squared distances as weights. `mae` is the mean absolute
    error of the expected value, and `spearman` its rank correlation with the gold numbers.
    """
    ends = {"qwk": (-1.0, 1.0), "mae": (0.0, values[-1] - values[0]), "spearman": (-1.0, 1.0)}
    figures = {}
    for name, (low, high) in ends.items():
        shares = (measured[name] - low) / (high - low)
        of_share = interval(float(shares[0]), shares[1:], rows=rows, rarest=rows)
        numbers = (of_share.value, of_share.low, of_share.high)
        figures[name] = Figure(*(None if n is None else low + (high - low) * n for n in numbers))
    return figures


def ordinal_metrics(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    values: Sequence[float],  # [labels]
    counts: Floats,  # [resamples, rows]: how often a row is in a resample
) -> dict[str, Floats]:  # [resamples] each
    """ORDINAL_HEADLINES of every resample; NaN where one is undefined."""
    numbers = np.array(values, np.float64)
    gold, likeliest, expected = numbers[truth], numbers[p.argmax(axis=1)], p @ numbers
    return {
        "qwk": kappas(gold, likeliest, counts),
        "mae": counts @ np.abs(expected - gold) / counts.sum(axis=1),
        "spearman": rank_correlations(gold, expected, counts),
    }


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
    has_spread = scale > _NO_SPREAD * total**3
    return np.asarray(np.divide(covariance, scale, out=empty, where=has_spread), np.float64)


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
