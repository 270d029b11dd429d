"""Thresholds are the best of all; label issues are those of a slow reading of the method."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import precision_recall_curve, roc_curve

from pipeline.evaluation.metrics import Bools, Floats
from pipeline.evaluation.thresholds import (
    find_label_issues,
    for_precision,
    for_recall,
    operating_points,
)


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
@pytest.mark.parametrize("least", [0.5, 0.7, 0.9, 1.0])
def test_the_best_threshold_is_the_best_of_all(seed: int, decimals: int, least: float) -> None:
    positive, score = sample(seed, decimals)
    every = tried(positive, score)
    points = operating_points(positive, score)
    best_recall = max((r for p, r in every if p >= least), default=None)
    best_precision = max(p for p, r in every if r >= least)
    precise, finding = for_precision(points, least), for_recall(points, least)
    assert (precise and precise.recall) == best_recall
    assert finding is not None and finding.precision == best_precision
    for best in (precise, finding):
        if best is not None:  # it has the metrics of its own threshold
            cut = score >= best.threshold
            assert cut.sum() == best.flagged and positive[cut].mean() == best.precision
            assert positive[cut].sum() / positive.sum() == best.recall


def test_the_curves_are_those_of_scikit_learn() -> None:
    positive, score = sample(0, 2)
    points = operating_points(positive, score)
    precision, recall, _ = precision_recall_curve(positive, score)
    np.testing.assert_allclose(points.precision, precision[-2::-1])
    np.testing.assert_allclose(points.recall, recall[-2::-1])
    false, true, _ = roc_curve(positive, score, drop_intermediate=False)
    np.testing.assert_allclose(points.false_positive_rate, false[1:])
    np.testing.assert_allclose(points.recall, true[1:])


def test_a_threshold_is_half_way_between_scores() -> None:
    points = operating_points(np.array([True, False, True]), np.array([0.2, 0.4, 0.8]))
    assert points.thresholds == pytest.approx([0.6, 0.3, 0.1])


def test_an_unreachable_minimum_has_no_threshold() -> None:
    score = np.array([0.9, 0.1])
    assert for_precision(operating_points(np.array([False, True]), score), 0.6) is None
    nothing = operating_points(np.array([False, False]), score)
    assert for_recall(nothing, 0.5) is None and for_precision(nothing, 0.5) is None


def test_label_issues_are_those_of_the_method_applied_row_by_row() -> None:
    source = np.random.default_rng(0)
    truth = source.integers(0, 3, 90)
    p = source.dirichlet(np.ones(3), 90)
    means = [np.mean([p[row][k] for row in range(90) if truth[row] == k]) for k in range(3)]
    expected = {}
    for row in range(90):
        reached = [k for k in range(3) if p[row][k] >= means[k]]
        likely = max(reached, key=lambda k: p[row][k], default=truth[row])
        if likely != truth[row] != p[row].argmax():
            expected[row] = likely, p[row][truth[row]] - p[row][likely]
    issues, labels = find_label_issues(truth, p)
    assert issues.tolist() == sorted(expected, key=lambda row: expected[row][1])
    assert labels.tolist() == [expected[row][0] for row in issues]


def test_flipped_labels_are_found_and_no_others() -> None:
    source = np.random.default_rng(1)
    truth = source.integers(0, 2, 400)
    first = np.clip(source.normal(np.where(truth == 0, 0.85, 0.15), 0.1), 0.01, 0.99)
    gold = truth.copy()
    gold[:20] = 1 - gold[:20]
    issues, _ = find_label_issues(gold, np.stack([first, 1 - first], axis=1))
    assert set(issues) <= set(range(20)) and len(issues) >= 10  # half reach their label's mean


def test_equal_answers_give_no_label_issue() -> None:
    issues, _ = find_label_issues(np.array([0, 1, 0, 1]), np.full((4, 2), 0.5, np.float32))
    assert not len(issues)


def test_a_label_without_gold_rows_is_never_the_likely_one() -> None:
    issues, _ = find_label_issues(np.array([0, 1]), np.array([[0.2, 0.1, 0.7], [0.1, 0.2, 0.7]]))
    assert not len(issues)
