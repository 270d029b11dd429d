"""The linear map has the probabilities of scikit-learn's fit to the standardised rows."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from pipeline.evaluation.linear import balanced_weights, fit_path


def problem(
    rows: int, hidden: int, labels: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float64]]:
    """States of very different scales, indices of labels, and the same as targets."""
    source = np.random.default_rng(rows + labels)
    states = source.normal(size=(rows, hidden)) * np.geomspace(0.1, 1_000, hidden) + 7
    noisy = (states - 7) / np.geomspace(0.1, 1_000, hidden) @ source.normal(size=(hidden, labels))
    truth = (noisy + source.normal(size=noisy.shape) * 2).argmax(axis=1)
    states[:, 0] = 3.0  # constant, with no deviation to divide by
    return states.astype(np.float32), truth, np.eye(labels)[truth]


@pytest.mark.parametrize("labels", [2, 4])
@pytest.mark.parametrize("rows, hidden", [(200, 20), (30, 60)])
@pytest.mark.parametrize("balanced", [False, True])
def test_probabilities_are_those_of_scikit_learn(
    labels: int, rows: int, hidden: int, balanced: bool
) -> None:
    states, truth, targets = problem(rows, hidden, labels)
    weights = balanced_weights(targets) if balanced else np.ones(rows)
    strengths = (0.01, 0.1, 1.0)
    for strength, fitted in zip(
        strengths, fit_path(states, targets, weights, strengths=strengths), strict=True
    ):
        oracle = LogisticRegression(
            C=strength, tol=1e-8, max_iter=10_000, class_weight="balanced" if balanced else None
        )
        x = StandardScaler().fit_transform(states.astype(np.float64))
        expected = oracle.fit(x, truth).predict_proba(x)
        np.testing.assert_allclose(softmax(fitted.logits(states), axis=1), expected, atol=2e-4)


@pytest.mark.parametrize("present", [[0, 2], [1], [3, 0, 1]])
def test_labels_without_a_row_get_almost_no_probability(present: list[int]) -> None:
    states, truth, _ = problem(90, 12, len(present) + 1)
    targets = np.eye(4)[np.array(present)[truth % len(present)]]
    for fitted in fit_path(states, targets, np.ones(90), strengths=[0.01, 0.1]):
        p = softmax(fitted.logits(states), axis=1)
        assert np.isfinite(p).all() and p[:, present].sum(axis=1).min() > 0.99
        np.testing.assert_allclose(p.mean(axis=0), targets.mean(axis=0), atol=5e-3)


def test_soft_targets_equal_a_weighted_row_for_each_label() -> None:
    states, _, _ = problem(80, 10, 3)
    targets = np.random.default_rng(0).dirichlet([0.5, 1, 1], 80)
    [fitted] = fit_path(states, targets, np.ones(80), strengths=[0.1])
    x = StandardScaler().fit_transform(states.astype(np.float64))
    oracle = LogisticRegression(C=0.1, tol=1e-8, max_iter=10_000)
    oracle.fit(np.repeat(x, 3, axis=0), np.tile([0, 1, 2], 80), targets.ravel())
    np.testing.assert_allclose(
        softmax(fitted.logits(states), axis=1), oracle.predict_proba(x), atol=2e-4
    )


def test_the_weights_of_a_rare_label_add_up_to_those_of_a_common_one() -> None:
    targets = np.eye(3)[[0] * 9 + [1]]  # the third label is in no row
    weights = balanced_weights(targets)
    assert weights[:9].sum() == pytest.approx(weights[9:].sum()) == pytest.approx(5)
