"""Calibrations: against scikit-learn and scipy, and the laws that every one keeps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator

from pipeline.fitted.calibration import (
    Calibration,
    CalibrationFile,
    Curve,
    Isotonic,
    Prior,
    Temperature,
    mean_prior,
    parse_calibration,
)
from pipeline.verbs.calibrate import fit_isotonic, fit_temperature

Array = NDArray[Any]


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def overconfident(docs: int, labels: int, seed: int, sharpness: float = 3.0) -> tuple[Array, Array]:
    """Probabilities as float32 files hold them, and right labels that follow softer ones."""
    source = np.random.default_rng(seed)
    logits = source.normal(0, 1.2, (docs, labels))
    right = (softmax(logits).cumsum(axis=1) < source.random((docs, 1))).sum(axis=1)
    return softmax(sharpness * logits).astype(np.float32).astype(np.float64), right


def ece(p: Array, right: Array, bins: int = 15) -> float:
    """Expected calibration error (Guo et al. 2017), by definition, bin by bin."""
    confidence, hit = p.max(axis=1), p.argmax(axis=1) == right
    total = 0.0
    for low in np.arange(bins) / bins:
        inside = (confidence > low) & (confidence <= low + 1 / bins)
        if inside.any():
            total += inside.mean() * abs(hit[inside].mean() - confidence[inside].mean())
    return total


class AsItIs(ClassifierMixin, BaseEstimator):
    """A classifier whose probabilities are its input."""

    def __init__(self, labels: int) -> None:
        self.classes_ = np.arange(labels)
        self.labels = labels

    def fit(self, p: Array, right: Array) -> AsItIs:
        return self

    def predict(self, p: Array) -> Array:
        return p.argmax(axis=1)

    def predict_proba(self, p: Array) -> Array:
        return p


@pytest.mark.parametrize("labels", [2, 5])
def test_isotonic_equals_scikit_learns_calibrated_classifier(labels: int) -> None:
    p, right = overconfident(600, labels, seed=1)
    fresh, _ = overconfident(500, labels, seed=2)
    oracle = CalibratedClassifierCV(
        FrozenEstimator(AsItIs(labels)), method="isotonic", ensemble=False
    )
    oracle.fit(p, right)
    np.testing.assert_allclose(
        fit_isotonic(p, right, np.ones(len(p))).apply(fresh),
        oracle.predict_proba(fresh),
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize("sharpness", [3.0, 1.0, 0.3])
def test_temperature_has_the_smallest_negative_log_likelihood(sharpness: float) -> None:
    p, right = overconfident(800, 4, seed=3, sharpness=sharpness)

    def likelihood(temperature: float) -> float:
        scaled = softmax(np.log(p) / temperature)
        return -float(np.log(scaled[np.arange(len(p)), right]).mean())

    fitted = fit_temperature(p, right, np.ones(len(p)))
    oracle = minimize_scalar(likelihood, bounds=(0.01, 100), method="bounded").x
    assert fitted.temperature == pytest.approx(oracle, rel=1e-3)
    assert fitted.temperature == pytest.approx(sharpness, rel=0.15)  # what was done is undone
    np.testing.assert_allclose(
        fitted.apply(p), softmax(np.log(p) / fitted.temperature), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("fit", [fit_temperature, fit_isotonic])
@pytest.mark.parametrize("labels", [2, 4])
def test_what_was_too_sure_becomes_honest_on_rows_never_seen(fit: Any, labels: int) -> None:
    fitted = fit(*overconfident(2_000, labels, seed=4), np.ones(2_000))
    p, right = overconfident(2_000, labels, seed=5)
    before, after = ece(p, right), ece(fitted.apply(p), right)
    assert before > 0.1 and after < 0.04, (before, after)


def test_a_prior_is_divided_out() -> None:
    p = np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
    by_hand = [[0.6 / 0.5, 0.3 / 0.25, 0.1 / 0.25], [0.2 / 0.5, 0.2 / 0.25, 0.6 / 0.25]]
    expected = [[w / sum(row) for w in row] for row in by_hand]
    np.testing.assert_allclose(Prior((0.5, 0.25, 0.25)).apply(p), expected, rtol=1e-15)


def test_the_mean_answer_itself_becomes_uniform() -> None:
    p, _ = overconfident(300, 3, seed=6)
    prior = mean_prior(p)
    np.testing.assert_allclose(prior.prior, p.sum(axis=0) / 300, rtol=1e-12)
    np.testing.assert_allclose(prior.apply(p.mean(axis=0, keepdims=True)), 1 / 3, rtol=1e-12)


LABELS = ("a", "b", "c")
CALIBRATIONS = [
    Calibration("batch", LABELS, Prior((0.1, 0.2, 0.7))),
    Calibration("batch", LABELS, mean_prior(overconfident(99, 3, seed=7)[0])),
    Calibration("temperature", LABELS, fit_temperature(*overconfident(99, 3, seed=8), np.ones(99))),
    Calibration("isotonic", LABELS, fit_isotonic(*overconfident(99, 3, seed=9), np.ones(99))),
    Calibration("isotonic", LABELS, Isotonic((Curve((0.5,), (0.0,)),) * 3)),  # gives no label any
]


WEIGHTS = st.floats(0, 1, width=32)  # also 0 and subnormal numbers
ROWS = st.lists(st.tuples(WEIGHTS, WEIGHTS, WEIGHTS).filter(any), min_size=1, max_size=20)


@pytest.mark.parametrize("calibration", CALIBRATIONS, ids=lambda each: str(each.method))
@given(ROWS)
@example([(1.0, 0, 0), (0, 1, 0), (0, 0, 1), (1e-38, 1e-45, 1), (1 / 3,) * 3])
def test_rows_sum_to_one_also_at_the_edges(
    calibration: Calibration, rows: list[tuple[float, float, float]]
) -> None:
    weights = np.array(rows)
    p = calibration.apply(weights / weights.sum(axis=1, keepdims=True))
    assert np.isfinite(p).all() and (p >= 0).all() and (p <= 1).all()
    np.testing.assert_allclose(p.sum(axis=1), 1, rtol=0, atol=1e-12)


@given(ROWS, st.floats(0.05, 20))
def test_a_temperature_keeps_the_order_of_the_labels(
    rows: list[tuple[float, float, float]], temperature: float
) -> None:
    weights = np.array(rows)
    p = weights / weights.sum(axis=1, keepdims=True)
    scaled = Temperature(temperature).apply(p)
    first, second = np.triu_indices(3, 1)
    rises = p[:, first] < p[:, second]
    assert (scaled[:, first] <= scaled[:, second])[rises].all()


SHARES = st.tuples(*[st.floats(0, 1, exclude_min=True)] * 3)
KNOTS = st.lists(st.floats(0, 1), min_size=1, max_size=6, unique=True).map(sorted).map(tuple)
CHANGES = st.one_of(
    st.builds(lambda prior: ("batch", Prior(prior)), SHARES),
    st.builds(lambda t: ("temperature", Temperature(t)), st.floats(1e-3, 1e3)),
    st.builds(lambda x: ("isotonic", Isotonic((Curve(x, x),) * 3)), KNOTS),
)


@given(CHANGES.map(lambda change: Calibration(change[0], LABELS, change[1])))
def test_json_gives_back_the_same_to_the_last_bit(calibration: Calibration) -> None:
    file = CalibrationFile("t", calibration, "f", {"snapshot": 1}, 7)
    assert parse_calibration(file.json()) == file


def test_a_label_that_never_came_is_raised_no_more_than_the_rarest_that_did() -> None:
    p = np.array([[0.899, 0.1, 0.001], [0.9, 0.1, 1e-30]])
    weights = p / [0.9, 0.1, 0.1]
    adjusted = Prior((0.9, 0.1, 0.0)).apply(p)
    np.testing.assert_allclose(adjusted, weights / weights.sum(axis=1, keepdims=True), rtol=1e-12)


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("magic", {}),
        ("temperature", {"temperature": 0.0}),
        ("temperature", {"temperature": float("nan")}),
        ("batch", {"prior": [0.5, 0.5]}),
        ("batch", {"prior": [0.5, 0.5, float("nan")]}),
        ("isotonic", {"curves": [{"x": [0.1], "y": [0.2]}]}),
        ("isotonic", {"curves": [{"x": [0.1], "y": [0.2]}] * 2}),
        ("isotonic", {"curves": [{"x": [0.1, 0.1], "y": [0.2, 0.3]}] * 3}),
        ("isotonic", {"curves": [{"x": [0.1, 0.2], "y": [0.3, 0.2]}] * 3}),
        ("isotonic", {"curves": [{"x": [0.1], "y": [1.2]}] * 3}),
    ],
)
def test_what_is_no_calibration_is_refused(method: str, parameters: dict[str, Any]) -> None:
    content = {"format": 1, "task": "t", "fingerprint": "f", "source": {}, "rows": 7}
    content |= {"method": method, "labels": LABELS, "parameters": parameters}
    with pytest.raises(ValueError):
        parse_calibration(json.dumps(content).encode())
