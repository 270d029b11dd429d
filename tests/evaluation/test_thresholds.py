"""Thresholds: against trying every cut, and scikit-learn's curves."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import precision_recall_curve, roc_curve

from pipeline.evaluation.metrics import Bools, Floats
from pipeline.evaluation.thresholds import for_precision, for_recall, operating_points


def sample(seed: int, decimals: int) -> tuple[Bools, Floats]:
    source = np.random.default_rng(seed)
    positive = source.random(60) < 0.4
    score = np.round(np.clip(source.normal(0.4 + 0.2 * positive, 0.25), 0, 1), decimals)
    return positive, score


def tried(positive: Bools, score: Floats) -> list[tuple[float, float]]:
    """Precision and recall of every cut."""
    cuts = [score >= cut for cut in np.unique(score)]
    return [(positive[cut].mean(), positive[cut].sum() / positive.sum()) for cut in cuts]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("decimals", [1, 6])
@pytest.mark.parametrize("wanted", [0.5, 0.7, 0.9, 1.0])
def test_the_best_cut_is_the_best_of_all_that_can_be_tried(
    seed: int, decimals: int, wanted: float
) -> None:
    positive, score = sample(seed, decimals)
    every = tried(positive, score)
    points = operating_points(positive, score)
    best_recall = max((r for p, r in every if p >= wanted), default=None)
    best_precision = max(p for p, r in every if r >= wanted)
    precise, finding = for_precision(points, wanted), for_recall(points, wanted)
    assert (precise and precise.recall) == best_recall
    assert finding is not None and finding.precision == best_precision
    for found in (precise, finding):
        if found is not None:  # what it says is what the cut gives
            cut = score >= found.threshold
            assert cut.sum() == found.flagged and positive[cut].mean() == found.precision
            assert positive[cut].sum() / positive.sum() == found.recall


def test_the_curves_are_those_of_scikit_learn() -> None:
    positive, score = sample(0, 2)
    points = operating_points(positive, score)
    precision, recall, _ = precision_recall_curve(positive, score)
    np.testing.assert_allclose(points.precision, precision[-2::-1])
    np.testing.assert_allclose(points.recall, recall[-2::-1])
    false, true, _ = roc_curve(positive, score, drop_intermediate=False)
    np.testing.assert_allclose(points.false_positive_rate, false[1:])
    np.testing.assert_allclose(points.recall, true[1:])


def test_a_cut_lies_between_scores_so_that_it_may_be_rounded() -> None:
    points = operating_points(np.array([True, False, True]), np.array([0.2, 0.4, 0.8]))
    assert points.thresholds == pytest.approx([0.6, 0.3, 0.1])


def test_what_cannot_be_reached_is_none() -> None:
    score = np.array([0.9, 0.1])
    assert for_precision(operating_points(np.array([False, True]), score), 0.6) is None
    nothing = operating_points(np.array([False, False]), score)
    assert for_recall(nothing, 0.5) is None and for_precision(nothing, 0.5) is None
