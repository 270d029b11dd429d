"""Drift equals scipy's, and sums by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon

from pipeline.integrity.diff import flip_rate, jensen_shannon, psi, shares

CASES = [([50, 50], [50, 50]), ([90, 10], [60, 40]), ([5, 0, 5], [0, 9, 1]), ([1, 0], [0, 1000])]


@pytest.mark.parametrize("before, after", CASES)
def test_the_divergence_is_scipys_distance_squared(before: list[int], after: list[int]) -> None:
    divergence = jensen_shannon(np.array(before), np.array(after))
    assert divergence == pytest.approx(jensenshannon(before, after, base=2) ** 2, abs=1e-12)


def test_nearly_equal_shares_have_a_divergence_of_nearly_zero() -> None:
    """scipy's own distance is NaN for about half of such pairs."""
    source = np.random.default_rng(0)
    for _ in range(200):
        before = source.integers(10**8, 10**9, 5)
        assert 0 <= jensen_shannon(before, before + source.integers(0, 3, 5)) < 1e-12


def test_psi_is_the_sum_by_hand() -> None:
    by_hand = (0.6 - 0.9) * math.log(0.6 / 0.9) + (0.4 - 0.1) * math.log(0.4 / 0.1)
    assert psi(np.array([90, 10]), np.array([6, 4])) == pytest.approx(by_hand)
    assert psi(np.array([6, 4]), np.array([90, 10])) == pytest.approx(by_hand)


def test_psi_is_finite_if_one_side_has_no_row_of_a_label() -> None:
    p, q = np.array([10, 0.5]) / 10.5, np.array([5, 5]) / 10
    by_hand = ((q - p) * np.log(q / p)).sum()
    assert psi(np.array([10, 0]), np.array([5, 5])) == pytest.approx(by_hand)


def test_the_flip_rate_is_the_share_off_the_diagonal() -> None:
    assert flip_rate(np.array([[5, 1], [2, 12]])) == pytest.approx(3 / 20)


def test_counts_of_zero_give_no_drift() -> None:
    nothing = np.zeros(2, dtype=np.int64)
    assert psi(nothing, np.array([1, 2])) == jensen_shannon(nothing, nothing) == 0.0
    assert flip_rate(np.zeros((2, 2), dtype=np.int64)) == 0.0
    assert shares(nothing).tolist() == [0, 0]
