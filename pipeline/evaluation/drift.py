"""How far two answerings of one corpus lie apart: shares of labels, and answers that flipped.

Knows counts. Knows nothing of snapshots, files or tasks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# An empty bin has no logarithm; a count of a half in place of none is the usual remedy (Jeffreys).
EMPTY_COUNT = 0.5

Counts = NDArray[np.int64]  # [labels]
Flips = NDArray[np.int64]  # [labels before, labels after]


def shares(counts: Counts) -> NDArray[np.float64]:
    """Each label's share; zeros where nothing was counted."""
    (labels,) = counts.shape
    whole = counts.sum()
    return counts / whole if whole else np.zeros(labels)


def psi(before: Counts, after: Counts) -> float:
    """The population stability index: sum of (q - p) ln(q / p) over the labels, in nats.

    Symmetric, 0 for equal shares; by custom below 0.1 is stable and above 0.25 is a shift
    (Siddiqi, Credit Risk Scorecards, 2006). A label that one side lacks counts half a document.
    """
    p, q = (shares(np.where(counts > 0, counts, EMPTY_COUNT)) for counts in (before, after))
    if not before.sum() or not after.sum():
        return 0.0
    return float(((q - p) * np.log(q / p)).sum())


def jensen_shannon(before: Counts, after: Counts) -> float:
    """The Jensen-Shannon divergence in bits: H((p + q) / 2) - (H(p) + H(q)) / 2, within [0, 1].

    Lin, Divergence Measures Based on the Shannon Entropy, 1991; its root is a distance.
    """
    p, q = shares(before), shares(after)
    if not before.sum() or not after.sum():
        return 0.0
    divergence = _entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2
    return float(min(max(divergence, 0.0), 1.0))


def flip_rate(flips: Flips) -> float:
    """Of the documents that both sides answered, the share whose label is another."""
    before, after = flips.shape
    assert before == after, flips.shape
    whole = flips.sum()
    return float(1 - np.trace(flips) / whole) if whole else 0.0


def _entropy(p: NDArray[np.float64]) -> float:
    some = p[p > 0]
    return float(-(some * np.log2(some)).sum())
