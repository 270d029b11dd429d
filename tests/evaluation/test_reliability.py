"""Reliability: against a slow count of every row's bin, and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.evaluation.metrics import (
    BINS,
    confidence_and_hits,
    expected_calibration_error,
    once,
    reliability_curve,
)


@pytest.mark.parametrize("decimals", [1, 2, 8])  # from nearly all equal to all distinct
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_bins_are_those_of_a_count_by_hand(rows: int, decimals: int) -> None:
    source = np.random.default_rng(rows)
    confidence = np.round(source.uniform(0.5, 1, rows), decimals)
    hits = source.random(rows) < confidence
    bins: dict[int, list[int]] = {}
    for row in range(rows):
        less_sure = sum(other < confidence[row] for other in confidence)
        bins.setdefault(int(BINS * less_sure / rows), []).append(row)
    error = sum(len(b) / rows * abs(hits[b].mean() - confidence[b].mean()) for b in bins.values())
    assert expected_calibration_error(confidence, hits, once(rows))[0] == pytest.approx(error)
    curve = reliability_curve(confidence, hits)
    assert [each.rows for each in curve] == [len(bins[key]) for key in sorted(bins)]
    for each, key in zip(curve, sorted(bins), strict=True):
        assert each.confidence == pytest.approx(confidence[bins[key]].mean())
        assert each.accuracy == pytest.approx(hits[bins[key]].mean())


def test_bins_of_distinct_confidences_are_of_equal_mass() -> None:
    confidence = np.random.default_rng(0).random(15 * 8)
    assert [each.rows for each in reliability_curve(confidence, confidence > 0.5)] == [8] * 15


def test_confidence_is_of_the_label_that_was_chosen() -> None:
    p = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
    confidence, hits = confidence_and_hits(np.array([0, 1]), p)
    assert confidence.tolist() == [0.7, 0.6] and hits.tolist() == [True, False]


def test_answers_as_sure_as_right_have_no_error_and_sure_wrong_ones_all_of_it() -> None:
    confidence = np.full(100, 0.75)
    right = np.arange(100) < 75
    assert expected_calibration_error(confidence, right, once(100))[0] == pytest.approx(0)
    assert expected_calibration_error(np.ones(9), np.zeros(9, np.bool_), once(9)) == pytest.approx(
        1
    )
