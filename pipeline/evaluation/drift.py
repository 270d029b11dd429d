"""How much labels changed between two answers to the same questions: shares, and flipped labels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import rel_entr

# The logarithm of an empty bin is infinite. A count of 0.5 replaces 0 (Jeffreys' prior).
EMPTY_COUNT = 0.5

Counts = NDArray[np.int64]  # [labels]
Flips = NDArray[np.int64]  # [labels before, labels after]


def shares(counts: Counts) -> NDArray[np.float64]:
    """Each label's share of all counts; zeros if all counts are 0."""
    (labels,) = counts.shape
    total = counts.sum()
    return counts / total if total else np.zeros(labels)


def psi(before: Counts, after: Counts) -> float:
    """The population stability index: the sum of (q - p) ln(q / p) over the labels, in nats.

    It is symmetric, and 0 for equal shares. By convention a value below 0.1 is stable, and above
    0.25 is a shift (Siddiqi 2006, "Credit Risk Scorecards"). A count of 0 is taken as 0.5.
    """
    p, q = (shares(np.where(counts > 0, counts, EMPTY_COUNT)) for counts in (before, after))
    if not before.sum() or not after.sum():
        return 0.0
    return float(((q - p) * np.log(q / p)).sum())


def jensen_shannon(before: Counts, after: Counts) -> float:
    """The Jensen-Shannon divergence in bits, from 0 to 1 (Lin 1991); 0 if one side is empty."""
    if not before.sum() or not after.sum():
        return 0.0
    p, q = shares(before), shares(after)
    divergence = (rel_entr(p, (p + q) / 2) + rel_entr(q, (p + q) / 2)).sum() / (2 * np.log(2))
    # — of nearly equal shares it is below 0 by rounding, and scipy's `jensenshannon` NaN
    return float(max(divergence, 0.0))


def flip_rate(flips: Flips) -> float:
    """The share of the documents with two answers whose label changed."""
    before, after = flips.shape
    assert before == after, flips.shape
    total = flips.sum()
    return float(1 - np.trace(flips) / total) if total else 0.0
