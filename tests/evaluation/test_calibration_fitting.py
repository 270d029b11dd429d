"""The scale and offsets of a readout's logits; `tests/fitted` has the calibrations of answers."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax

from pipeline.evaluation.calibration_fitting import fit_logits, log_loss


def test_a_fit_restores_the_scale_and_the_offset_that_were_taken_away() -> None:
    source = np.random.default_rng(1)
    logits = source.normal(size=(20_000, 3)) * 2
    p = softmax(logits, axis=1)
    truth = (p.cumsum(axis=1) > source.random((20_000, 1))).argmax(axis=1)
    targets = np.eye(3)[truth]
    shift = np.array([0.5, 0.0, -0.5])
    scale, offset = fit_logits((logits - shift) / 4, targets, offsets=True)
    assert scale == pytest.approx(4, rel=0.05)
    np.testing.assert_allclose(offset - offset[1], shift, atol=0.08)
    scale, offset = fit_logits(logits * 4, targets, offsets=False)
    assert scale == pytest.approx(0.25, rel=0.05) and not offset.any()


def test_the_scale_of_separated_rows_is_bounded() -> None:
    targets = np.eye(2)[[0, 1] * 10]
    scale, _ = fit_logits(targets * 9, targets, offsets=True)
    assert scale <= np.exp(3.001)


def test_a_fit_lowers_the_loss_of_its_rows() -> None:
    source = np.random.default_rng(0)
    logits, targets = source.normal(size=(300, 2)), np.eye(2)[source.integers(0, 2, 300)]
    scale, offset = fit_logits(logits, targets, offsets=True)
    assert log_loss(scale * logits + offset, targets) < log_loss(logits, targets)
