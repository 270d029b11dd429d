"""Thresholds of a cascade that hold recall and precision with a stated confidence.

Entry point: `choose`. The problem is that of SUPG (Kang et al., "Approximate Selection with
Guarantees using Proxies", VLDB 2020): a cheap score, an expensive answer, and a sample for which
both are known. Its bounds are of the normal approximation. Here the sample is uniform, so the exact
bound of Clopper and Pearson (1934) is used, which holds for samples of any size.

Assumption: the sample is drawn uniformly at random from the documents that the cascade will label.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

Bools = NDArray[np.bool_]
Floats = NDArray[np.floating]
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Promise:
    """What shall hold, with which probability."""

    recall: float  # of the documents that are positive, the share that the cascade calls so
    precision: float  # of the documents that the cascade calls positive, the share that is so
    confidence: float = CONFIDENCE  # the probability, over samples, that both hold

    @property
    def positives_needed(self) -> int:
        """The fewest positive documents in a sample with which both can be shown.

        With this many, not one error is allowed.
        """
        shares = (1 - self.recall, self._false_share)
        return max(ceil(log(self._risk) / log(1 - share)) for share in shares)

    @property
    def _risk(self) -> float:
        """The probability of error that each of the two may have."""
        return (1 - self.confidence) / 2

    @property
    def _false_share(self) -> float:
        """The most false positives, as a share of these and all positives together.

        If recall holds, at least `recall` of the positives are called so. Then precision holds if
        there are at most recall * (1 - precision) / precision false ones for each positive.
        """
        ratio = self.recall * (1 - self.precision) / self.precision
        return ratio / (1 + ratio)

    def errors_allowed(self, positives: int) -> tuple[int, int]:
        """The most missed and the most false documents of a sample; -1: not even none.

        Args:
            positives: The positive documents in the sample.
        """
        errors = np.arange(positives + 1)
        is_held = _upper_bound(errors, positives, self._risk) <= 1 - self.recall
        # — false ones come on top of the positives; more than the positives are never allowed
        is_precise = _upper_bound(errors, errors + positives, self._risk) <= self._false_share
        return int(is_held.sum()) - 1, int(is_precise.sum()) - 1


def _upper_bound(
    errors: NDArray[np.integer], trials: NDArray[np.integer] | int, risk: float
) -> Floats:
    """The largest error rate that the counts do not refute (Clopper and Pearson)."""
    # — where every trial is an error, the bound is 1, and the law of the other cases undefined
    bound: Floats = np.nan_to_num(beta.ppf(1 - risk, errors + 1, trials - errors), nan=1.0)
    return bound


def choose(
    scores: Floats,  # [stages before the last, docs]
    positive: Bools,  # [docs]: by the last stage
    promise: Promise,
) -> tuple[float, float]:
    """The thresholds below and above which a stage decides.

    The lower one rises, and the upper one falls, until one error more would be too many. An error
    of any stage counts. Because more extreme thresholds never add an error, no correction for the
    number of tries is needed: the first threshold that breaks the promise is one fixed number, and
    it is taken with at most the stated risk.

    Args:
        scores: The probability of the positive label that each stage before the last gives.
        positive: Whether the last stage answers with the positive label; at least
            `promise.positives_needed` of them.
        promise: What shall hold.
    """
    missed_allowed, false_allowed = promise.errors_allowed(int(positive.sum()))
    assert missed_allowed >= 0 and false_allowed >= 0, positive.sum()
    # — the first stage to be wrong is the one with the most extreme score
    missed = np.sort(scores.min(axis=0)[positive])
    false = -np.sort(-scores.max(axis=0)[~positive])
    below = np.append(missed, 1.0)[missed_allowed]
    above = false[false_allowed] if false_allowed < len(false) else 0.0
    # — as float32, in which the scores are stored; the middle stays with the last stage
    low = min(np.nextafter(np.float32(below), np.float32(-1)), np.float32(0.499))
    high = max(np.nextafter(np.float32(above), np.float32(2)), np.float32(0.501))
    return float(low), float(high)
