"""Figures with 95 % intervals; each interval is wider than 0.

Entry points: `wilson` for shares, `auroc_interval`, `interval` for resampled metrics, and
`error_figure` for calibration errors.
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
Ints = NDArray[np.int64]

CONFIDENCE = 0.95
NORMAL = float(norm.ppf((1 + CONFIDENCE) / 2))
_PERCENTILES = (2.5, 97.5)
_NO_WIDTH = 1e-9  # of an interval: rounding
# Of a calibration error: its simulations, and the search for a multiple of its gaps.
_SEED, _SIMULATIONS = 20_26, 1_000
_MOST_GAPS, _HALVINGS = 64, 20


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

    # — at 0 and at 1 the error is 0, too, and that is not the end that is looked for
    low = brentq(excess, 0.0, min(value, 1 - _NO_WIDTH)) if value > 0 else 0.0
    high = brentq(excess, max(value, _NO_WIDTH), 1.0) if value < 1 else 1.0
    return float(low), float(high)


def interval(
    value: float,
    resampled: Floats,  # [resamples]
    *,
    rows: float,
    rarest: float,  # rows of what the metric depends on most
) -> Figure:
    """The interval of a metric from 0 to 1, by the spread of its bootstrap resamples.

    It is symmetric on the scale of logits, with Student's quantile for the rarest label: ends of
    percentiles are too close for few rows. Where all resamples are equal, as for answers that are
    all right, rows of another kind may exist: the interval is that of a mean of numbers of which
    the largest share that was not seen is different.
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


def error_figure(
    rows: Ints,  # [bins]
    confidence: Floats,  # [bins]
    accuracy: Floats,  # [bins]
) -> Figure:
    """A calibration error, the mean absolute gap of accuracy and confidence, with its interval.

    The noise of few rows adds to every absolute gap, so the mean of the observed ones is too high:
    of a perfect model it is never 0. So the interval has each multiple of the observed gaps for
    which the observed mean, with noise, is neither among the lowest nor among the highest
    `_PERCENTILES` of 1,000 simulations. The value is the multiple for which it is the median.
    """
    gaps, shares, unseen = accuracy - confidence, rows / rows.sum(), unseen_share(rows.sum())
    observed = float(np.abs(gaps) @ shares)
    normal = np.random.default_rng(_SEED).normal(size=(_SIMULATIONS, len(gaps)))

    def error_at(percentile: float) -> float:
        """The error of the multiple at which the observed mean is this percentile."""

        def is_below(multiple: float) -> bool:
            # — one more row, which is as the model says, keeps the noise off 0
            of_rows = (rows * (confidence + multiple * gaps) + confidence) / (rows + 1)
            spread = np.sqrt(np.clip(of_rows * (1 - of_rows), 0, None) / rows)
            simulated = np.abs(multiple * gaps + spread * normal) @ shares
            return bool(np.percentile(simulated, percentile) < observed)

        low, high = 0.0, 1.0 if is_below(0.0) else 0.0
        while is_below(high) and 0 < high < _MOST_GAPS:
            high *= 2
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if is_below(middle) else (low, middle)
        return min(1.0, high * observed)

    highest, value, lowest = map(error_at, (_PERCENTILES[0], 50, _PERCENTILES[1]))
    return Figure(value, min(lowest, value), min(1.0, max(highest, value, unseen)))


def _quantile(rows: float) -> float:
    return float(students_t.ppf((1 + CONFIDENCE) / 2, max(1.0, rows - 1)))


def number_or_none(value: float) -> float | None:
    """The value, or None for NaN, which JSON cannot represent."""
    return None if np.isnan(value) else float(value)
