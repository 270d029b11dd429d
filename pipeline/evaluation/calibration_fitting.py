"""Fits calibrations to gold labels: of answers, and of the logits of a trained readout."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize, minimize_scalar
from scipy.special import log_softmax
from sklearn.isotonic import IsotonicRegression

from pipeline.evaluation.metrics import Bools, Floats, Ints
from pipeline.fitted.calibration import Curve, Isotonic, Temperature, curves_for, log_p

# Beyond these limits, answers are nearly one-hot or nearly uniform.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 100.0
# Logits that separate all rows would be scaled without limit, and a label without rows would get an
# unlimited offset. A scale of 20, or odds of 20 to 1, is the limit.
_LARGEST = 3.0


def log_loss(logits: Floats, targets: Floats) -> float:  # [rows, labels] each
    """The mean cross-entropy of the rows."""
    return float(-(targets * log_softmax(logits, axis=1)).sum(axis=1).mean())


def fit_temperature(p: Floats, truth: Ints) -> Temperature:  # [docs, labels], [docs]
    """The temperature with the smallest negative log-likelihood (Guo et al. 2017).

    The likelihood has one maximum, because its logarithm is concave in 1 / temperature.
    """
    logits, targets = log_p(p), np.eye(p.shape[1])[truth]
    limits = math.log(LOWEST_TEMPERATURE), math.log(HIGHEST_TEMPERATURE)
    best = minimize_scalar(
        lambda log_temperature: log_loss(logits / math.exp(log_temperature), targets),
        bounds=limits,
        method="bounded",
        options={"xatol": 1e-8},
    )
    return Temperature(math.exp(best.x))


def fit_isotonic(p: Floats, truth: Ints) -> Isotonic:  # [docs, labels], [docs]
    """A rising curve for each label against all others (Zadrozny & Elkan 2002)."""
    _docs, labels = p.shape
    curved = range(labels - curves_for(labels), labels)
    return Isotonic(tuple(_curve(p[:, label], truth == label) for label in curved))


def _curve(p: NDArray[np.floating], positive: Bools) -> Curve:  # [docs] each
    regression = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
    regression.fit(p.astype(np.float64), positive.astype(np.float64))
    knots = regression.X_thresholds_, regression.y_thresholds_
    return Curve(tuple(map(float, knots[0])), tuple(map(float, knots[1])))


def fit_logits(
    logits: Floats,  # [rows, labels], of rows that the map was not fitted to
    targets: Floats,  # [rows, labels]
    *,
    offsets: bool,
) -> tuple[float, Floats]:
    """The scale, and with `offsets` each label's offset, that minimise the cross-entropy.

    A map that was fitted with label weights is off by about the logarithm of these weights. The
    offsets correct that.
    """
    rows, labels = logits.shape

    def loss(flat: Floats) -> tuple[float, Floats]:
        scale, offset = np.exp(flat[0]), flat[1:]
        log_probabilities = log_softmax(scale * logits + offset, axis=1)
        error = (np.exp(log_probabilities) - targets) / rows
        gradient = np.concatenate([[scale * (error * logits).sum()], error.sum(axis=0)])
        return -(targets * log_probabilities).sum() / rows, gradient

    bounds = [(-_LARGEST, _LARGEST), *[(-_LARGEST, _LARGEST) if offsets else (0, 0)] * labels]
    best = minimize(loss, np.zeros(1 + labels), jac=True, method="L-BFGS-B", bounds=bounds).x
    return float(np.exp(best[0])), best[1:]
