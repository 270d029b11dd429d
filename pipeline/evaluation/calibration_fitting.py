"""Fits a calibration to gold answers.

Knows probabilities and the places of the right labels. Knows nothing of documents or files.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression

from pipeline.fitted.calibration import (
    Curve,
    Isotonic,
    Probabilities,
    Temperature,
    curves_for,
    log_p,
)

# Beyond these every row is told apart perfectly, or not at all.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 100.0
# Halvings of that range, in logarithms: less is left than a float64 can tell.
HALVINGS = 64

Places = NDArray[np.int64]  # [docs]: which label is right


def fit_temperature(p: Probabilities, right: Places) -> Temperature:
    """The temperature of the smallest negative log-likelihood (Guo et al. 2017).

    In 1/T the likelihood is convex, so its slope has one zero, which is found by halving.
    """
    docs, _labels = p.shape
    logarithms = log_p(p)
    reached = logarithms[np.arange(docs), right].mean()
    low, high = -math.log(HIGHEST_TEMPERATURE), -math.log(LOWEST_TEMPERATURE)  # of log 1/T
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        expected = (Temperature(math.exp(-middle)).apply(p) * logarithms).sum(axis=1).mean()
        if expected < reached:
            low = middle
        else:
            high = middle
    return Temperature(math.exp(-(low + high) / 2))


def fit_isotonic(p: Probabilities, right: Places) -> Isotonic:
    """One rising curve a label, each against all others (Zadrozny & Elkan 2002)."""
    _docs, labels = p.shape
    curved = range(labels - curves_for(labels), labels)
    return Isotonic(tuple(_curve(p[:, label], right == label) for label in curved))


def _curve(p: NDArray[np.float64], is_right: NDArray[np.bool_]) -> Curve:
    fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
    fitted.fit(p.astype(np.float64), is_right.astype(np.float64))
    x, y = fitted.X_thresholds_, fitted.y_thresholds_
    return Curve(tuple(map(float, x)), tuple(map(float, y)))
