"""Thresholds are the best of all; label issues are those of a slow reading of the method."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.evaluation.operating_points import choose_threshold, find_label_issues
from pipeline.evaluation.resampling import Bools, Floats


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
    best_recall = max((r for p, r in every if p >= least), default=None)
    best_precision = max(p for p, r in every if r >= least)
    precise = choose_threshold("precision", least, positive, score)
    finding = choose_threshold("recall", least, positive, score)
    assert (precise is None) == (best_recall is None)
    if precise is not None:
        cut = score >= precise.threshold
        assert cut.sum() == precise.flagged and positive[cut].mean() >= least - 1e-9
        neighbours = score[cut].min(), score[~cut].max(initial=0.0)
        assert precise.threshold == pytest.approx(np.mean(neighbours))
        assert positive[cut].sum() / positive.sum() == best_recall
    assert finding is not None
    cut = score >= finding.threshold
    assert positive[cut].mean() == pytest.approx(best_precision)
    assert positive[cut].sum() / positive.sum() >= least - 1e-9


def test_the_precision_of_a_threshold_is_what_other_rows_get() -> None:
    """Of random scores, the best threshold of 200 rows looks good on these rows."""
    truths, estimates = [], []
    for seed in range(40):
        source = np.random.default_rng(seed)
        positive, score = source.random(200) < 0.5, source.random(200)
        chosen = choose_threshold("precision", 0.62, positive, score)
        if chosen is not None and chosen.precision.value is not None:
            truths.append(positive[score >= chosen.threshold].mean())
            estimates.append(chosen.precision.value)
            assert chosen.precision.low is not None and chosen.precision.high is not None
            assert chosen.precision.low < chosen.precision.high
    assert len(truths) > 20 and min(truths) >= 0.62
    assert np.mean(estimates) == pytest.approx(0.5, abs=0.12)


def test_a_single_row_has_a_threshold_without_an_expectation() -> None:
    """No other row can choose a threshold for it."""
    chosen = choose_threshold("recall", 0.5, np.ones(1, bool), np.array([0.8]))
    assert chosen is not None and (chosen.threshold, chosen.precision.value) == (0.4, None)


def test_an_unreachable_minimum_has_no_threshold() -> None:
    score = np.array([0.9, 0.1])
    assert choose_threshold("precision", 0.6, np.array([False, True]), score) is None
    for metric in ("precision", "recall"):
        assert choose_threshold(metric, 0.5, np.array([False, False]), score) is None


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


@pytest.mark.parametrize(
    "p", [[[0.5, 0.5]] * 2, [[0.2, 0.1, 0.7], [0.1, 0.2, 0.7]]], ids=["equal", "no gold rows"]
)
def test_equal_answers_and_a_label_without_gold_rows_give_no_issue(p: list[list[float]]) -> None:
    issues, _ = find_label_issues(np.array([0, 1]), np.array(p))
    assert not len(issues)
