"""Thresholds of a cascade: against the definition, and how often their promise holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from pipeline.evaluation.cascade_guarantee import Promise, choose

shares = st.floats(0.5, 0.98)
PROMISE = Promise(recall=0.9, precision=0.85, confidence=0.9)


@given(shares, shares, st.floats(0.5, 0.99), st.integers(1, 400))
def test_the_errors_allowed_are_the_most_that_the_binomial_law_allows(
    recall: float, precision: float, confidence: float, positives: int
) -> None:
    promise = Promise(recall, precision, confidence)
    missed, false = promise.errors_allowed(positives)
    risk = (1 - confidence) / 2
    # — so few errors would be seen with at most this probability, were the promise broken
    assert missed < 0 or binom.cdf(missed, positives, 1 - recall) <= risk * (1 + 1e-6)
    assert binom.cdf(missed + 1, positives, 1 - recall) > risk * (1 - 1e-6)
    most = recall * (1 - precision) / precision
    share = most / (1 + most)
    if false >= 0:
        assert binom.cdf(false, false + positives, share) <= risk * (1 + 1e-6)
    if false < positives:
        assert binom.cdf(false + 1, false + 1 + positives, share) > risk * (1 - 1e-6)
    enough = positives >= promise.positives_needed
    assert enough == (missed >= 0 and false >= 0)


@given(st.integers(0, 10_000), st.integers(1, 3))
def test_the_thresholds_are_the_widest_with_the_errors_allowed(seed: int, stages: int) -> None:
    random = np.random.default_rng(seed)
    truth = random.random(300) < 0.4
    noise = random.normal(0, 1, (stages, 300))
    scores = (1 / (1 + np.exp(-(4 * truth - 2 + noise)))).astype(np.float32).round(2)
    missed_allowed, false_allowed = PROMISE.errors_allowed(int(truth.sum()))
    low, high = choose(scores, truth, PROMISE)

    def errors(low: float, high: float) -> tuple[int, int]:
        against, for_it = (scores <= low).any(axis=0), (scores >= high).any(axis=0)
        return (truth & against).sum(), (~truth & for_it).sum()

    assert low < 0.5 < high
    missed, false = errors(low, high)
    assert missed <= missed_allowed and false <= false_allowed
    lower = scores[(scores > low) & (scores < 0.49)]
    upper = scores[(scores < high) & (scores > 0.51)]
    assert not len(lower) or errors(float(lower.min()), 2)[0] > missed_allowed
    assert not len(upper) or errors(-1, float(upper.max()))[1] > false_allowed


@pytest.mark.parametrize(("share", "strength"), [(0.5, 4.0), (0.15, 3.0), (0.3, 2.0)])
def test_the_promise_holds_as_often_as_it_says(share: float, strength: float) -> None:
    """400 samples of one corpus whose answers are all known."""
    random = np.random.default_rng(7)
    truth = random.random(20_000) < share
    score = 1 / (1 + np.exp(-(strength * (2 * truth - 1) / 2 + random.normal(0, 1, 20_000))))
    held, decided = [], []
    for _ in range(400):
        sample = random.choice(20_000, 600, replace=False)
        chosen = choose(score[None, sample], truth[sample], PROMISE)
        against, for_it = score <= chosen[0], score >= chosen[1]
        answers = for_it | (truth & ~against)
        right = (answers & truth).sum()
        held.append(right >= 0.9 * truth.sum() and right >= 0.85 * answers.sum())
        decided.append((against | for_it).mean())
    assert np.mean(held) >= PROMISE.confidence
    assert np.mean(decided) > 0.3


def test_no_error_is_allowed_with_the_fewest_positives() -> None:
    promise = Promise(recall=0.95, precision=0.9, confidence=0.95)
    assert promise.positives_needed == 72  # .95 ** 72 < .025
    assert promise.errors_allowed(72)[0] == 0 and promise.errors_allowed(71)[0] == -1
