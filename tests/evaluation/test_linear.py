"""The linear fit, against scikit-learn's on the same standardised rows."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from pipeline.evaluation.linear import (
    balanced_weights,
    calibration,
    fit_path,
    log_loss,
    probabilities,
)


def problem(
    rows: int, hidden: int, labels: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float64]]:
    """States of very different scales, indices of labels, and the same as targets."""
    source = np.random.default_rng(rows + labels)
    states = source.normal(size=(rows, hidden)) * np.geomspace(0.1, 1_000, hidden) + 7
    noisy = (states - 7) / np.geomspace(0.1, 1_000, hidden) @ source.normal(size=(hidden, labels))
    truth = (noisy + source.normal(size=noisy.shape) * 2).argmax(axis=1)
    states[:, 0] = 3.0  # says nothing, and has no deviation to divide by
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
        np.testing.assert_allclose(probabilities(fitted.logits(states)), expected, atol=2e-4)


def test_soft_targets_are_each_row_once_for_every_label() -> None:
    states, _, _ = problem(80, 10, 3)
    targets = np.random.default_rng(0).dirichlet([0.5, 1, 1], 80)
    [fitted] = fit_path(states, targets, np.ones(80), strengths=[0.1])
    x = StandardScaler().fit_transform(states.astype(np.float64))
    oracle = LogisticRegression(C=0.1, tol=1e-8, max_iter=10_000)
    oracle.fit(np.repeat(x, 3, axis=0), np.tile([0, 1, 2], 80), targets.ravel())
    np.testing.assert_allclose(
        probabilities(fitted.logits(states)), oracle.predict_proba(x), atol=2e-4
    )


def test_calibration_finds_the_scale_and_the_offset_that_were_taken_away() -> None:
    source = np.random.default_rng(1)
    logits = source.normal(size=(20_000, 3)) * 2
    p = probabilities(logits)
    truth = (p.cumsum(axis=1) > source.random((20_000, 1))).argmax(axis=1)
    targets = np.eye(3)[truth]
    shift = np.array([0.5, 0.0, -0.5])
    scale, offset = calibration((logits - shift) / 4, targets, offsets=True)
    assert scale == pytest.approx(4, rel=0.05)
    np.testing.assert_allclose(offset - offset[1], shift, atol=0.08)
    scale, offset = calibration(logits * 4, targets, offsets=False)
    assert scale == pytest.approx(0.25, rel=0.05) and not offset.any()


def test_calibration_of_separated_rows_is_bounded() -> None:
    targets = np.eye(2)[[0, 1] * 10]
    scale, _ = calibration(targets * 9, targets, offsets=True)
    assert scale <= np.exp(3.001)


def test_the_weights_of_a_rare_label_add_up_to_those_of_a_common_one() -> None:
    targets = np.eye(3)[[0] * 9 + [1]]  # the third label is in no row
    weights = balanced_weights(targets)
    assert weights[:9].sum() == pytest.approx(weights[9:].sum()) == pytest.approx(5)
    assert log_loss(np.zeros((10, 3)), targets, weights) == pytest.approx(np.log(3))
