"""Figures with 95 % intervals; each interval is wider than 0.

Entry points: `wilson` for shares, `auroc_interval`, `interval` for resampled metrics, `difference`
for those of two, and `mean_figure` for means of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import norm
from scipy.stats import t as students_t

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
NORMAL = float(norm.ppf((1 + CONFIDENCE) / 2))
_NO_WIDTH = 1e-9  # of an interval: rounding


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric and its 95 % interval; None where it is undefined."""

    value: float | None
    low: float | None
    high: float | None


def wilson(share: float, rows: float, quantile: float = NORMAL) -> tuple[float, float]:
    """Wilson's interval (1927) of a share that was observed in this many rows, above 0.

    It is never empty, also at a share of 0 or 1.
    """
    square = quantile**2
    centre = (share + square / (2 * rows)) / (1 + square / rows)
    half = quantile / (1 + square / rows) * sqrt(share * (1 - share) / rows + square / rows**2 / 4)
    # — rounding could leave the share itself out where it is 0 or 1
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def unseen_share(rows: float) -> float:
    """The largest share of rows of another kind that this many equal rows do not refute.

    Clopper and Pearson's bound (1934) for a count of 0, with half of the error of an interval.
    """
    return float(1 - ((1 - CONFIDENCE) / 2) ** (1 / rows))


def auroc_interval(value: float, positives: float, negatives: float) -> tuple[float, float]:
    """The interval of an AUROC of two labels with these numbers of rows.

    Method 5 of Newcombe ("Confidence intervals for an effect size measure based on the Mann-Whitney
    statistic. Part 2", Statistics in Medicine 2006): the AUROCs whose distance from `value` is at
    most a quantile times their own standard error. The quantile is Student's, for a few rows.
    """
    quantile = _quantile(min(positives, negatives))
    pairs, mean = positives * negatives, (positives + negatives) / 2 - 1

    def excess(auroc: float) -> float:
        spread = 1 + mean * ((1 - auroc) / (2 - auroc) + auroc / (1 + auroc))
        return (value - auroc) ** 2 - quantile**2 * auroc * (1 - auroc) * spread / pairs

    # — the excess is also 0 at auroc 0 or 1, which is not the wanted root
    low = brentq(excess, 0.0, min(value, 1 - _NO_WIDTH)) if value > 0 else 0.0
    high = brentq(excess, max(value, _NO_WIDTH), 1.0) if value < 1 else 1.0
    return float(low), float(high)


def interval(
    value: float,
    resampled: Floats,  # [resamples]
    *,
    rows: float,
    rarest: float,  # rows of the rarest label that the metric depends on
) -> Figure:
    """The interval of a metric from 0 to 1, by the spread of its bootstrap resamples.

    It is symmetric on the scale of logits, with Student's quantile for the rarest label: percentile
    intervals are too narrow for few rows. If all resamples are equal, as when all answers are
    right, other rows may still differ: the interval is then that of a mean in which the share
    `unseen_share` of the rows differs.
    """
    defined = resampled[~np.isnan(resampled)]
    if np.isnan(value) or not len(defined):
        return Figure(number_or_none(value), None, None)
    if np.ptp(defined) < _NO_WIDTH:
        unseen = unseen_share(rarest)
        return Figure(float(value), value * (1 - unseen), value + unseen * (1 - value))
    least = 1 / (2 * rows)  # — half a row, for resamples at 0 or 1
    spread = float(logit(np.clip(defined, least, 1 - least)).std())
    half = _quantile(rarest) * spread
    centre = logit(np.clip(value, least, 1 - least))
    low, high = (float(expit(centre + side * half)) for side in (-1, 1))
    return Figure(float(value), min(low, value), max(high, value))


def difference(of: Floats, other: Floats, rarest: float) -> Figure:  # [1 + resamples] each
    """How much larger the first value is than the other, of the same resamples, in this order.

    If the difference is equal in all resamples, other rows may still differ.
    """
    drawn = of[1:] - other[1:]
    defined = drawn[~np.isnan(drawn)]
    value = number_or_none(of[0] - other[0])
    if value is None or not len(defined):
        return Figure(value, None, None)
    half = _quantile(rarest) * float(defined.std())
    if np.ptp(defined) < _NO_WIDTH:
        half = unseen_share(rarest)
    return Figure(value, value - half, value + half)


def mean_figure(values: Floats, *, least: float = -np.inf) -> Figure:  # [rows]
    """The mean of at least two rows, none below `least`, with Student's interval."""
    mean, half = float(values.mean()), float(values.std(ddof=1)) * _quantile(len(values))
    half /= sqrt(len(values))
    return Figure(mean, max(least, mean - half), mean + half)


def _quantile(rows: float) -> float:
    return float(students_t.ppf((1 + CONFIDENCE) / 2, max(1.0, rows - 1)))


def number_or_none(value: float) -> float | None:
    """The value, or None for NaN, which JSON cannot represent."""
    return None if np.isnan(value) else float(value)
