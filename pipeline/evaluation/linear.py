"""A linear map from states to label logits: standardised, L2-regularised, then calibrated.

Multinomial logistic regression as scikit-learn's, and beside it: targets that are probabilities,
and a row space of no more dimensions than rows, which changes no solution. Knows arrays. Knows
nothing of layers, folds or of what labels are called.

Starting from the unembedding rows of the labels (their logits as a fixed offset, of which the fit
learns the difference) was tried and left out. After 20 rows of a question that SmolLM2-135M does
not understand (zero-shot AUROC 0.44), 20 splits, C of 0.01: AUROC 0.780 without it, 0.776 with 0.3
of the offset, 0.762 with all of it; after 100 rows 0.875, 0.874 and 0.871.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax
from threadpoolctl import threadpool_limits

Floats = NDArray[np.float64]

# Of the mean loss, whose gradient's largest part: far below what a fold's figures can show.
_TOLERANCE = 1e-6
_MAX_STEPS = 1_000
# Logits that separate all rows would be scaled without end, and a label that no row has pushed
# away; a scale of 20, or odds of 20 to 1, is as far as calibration goes.
_LARGEST = 3.0


@contextmanager
def one_thread() -> Iterator[None]:
    """Products as small as these: more threads wait for each other, on a busy machine for long."""
    with threadpool_limits(1, user_api="blas"):
        yield


@dataclass(frozen=True, slots=True)
class Linear:
    """Logits of a state: `weight @ state + bias`."""

    weight: Floats  # [labels, hidden]
    bias: Floats  # [labels]

    def logits(self, states: NDArray[np.floating]) -> Floats:  # [rows, hidden] -> [rows, labels]
        found: Floats = states.astype(np.float64) @ self.weight.T + self.bias
        return found

    def scaled(self, scale: float, offset: Floats) -> Linear:
        """The map whose logits are `scale * logits + offset`."""
        return Linear(scale * self.weight, scale * self.bias + offset)


def probabilities(logits: Floats) -> Floats:  # [rows, labels], rows summing to 1
    found: Floats = np.exp(log_softmax(logits, axis=1))
    return found


def log_loss(logits: Floats, targets: Floats, weights: Floats) -> float:
    """The weighted mean of a row's cross-entropy."""
    losses = -(targets * log_softmax(logits, axis=1)).sum(axis=1)
    return float(losses @ weights / weights.sum())


def balanced_weights(targets: Floats) -> Floats:  # [rows, labels] -> [rows]
    """Row weights under which every label that there is weighs the same; all sum to the rows."""
    rows, _ = targets.shape
    counts = targets.sum(axis=0)
    there = counts > 0
    by_label = np.where(there, rows / (there.sum() * np.where(there, counts, 1)), 0.0)
    weights: Floats = targets @ by_label
    return weights


def fit_path(
    states: NDArray[np.floating],  # [rows, hidden]
    targets: Floats,  # [rows, labels]: rows of probabilities
    weights: Floats,  # [rows]
    *,
    strengths: Sequence[float],  # C, rising; the smaller, the more is regularised
) -> list[Linear]:  # one a strength
    """The minima of C * sum of weighted losses + |coefficients|^2 / 2 over standardised states.

    Of two labels there is one row of coefficients, of more labels one each; intercepts are free.
    """
    mean = states.mean(axis=0, dtype=np.float64)
    deviation = states.std(axis=0, dtype=np.float64)
    scale = np.where(deviation > 0, deviation, 1.0)
    x, basis = _row_space((states - mean) / scale)  # [rows, dims], [hidden, dims]
    spread = _spread(targets.shape[1])  # [labels, free]
    theta = np.zeros((spread.shape[1], x.shape[1] + 1))
    found = []
    for strength in strengths:
        theta = _minimised(x, targets, weights, spread, strength, start=theta)
        weight = spread @ (theta[:, :-1] @ basis.T / scale)  # [labels, hidden]
        found.append(Linear(weight, spread @ theta[:, -1] - weight @ mean))
    return found


def _spread(labels: int) -> Floats:  # [labels, free]
    """How free rows of coefficients become the labels' rows: of two labels, half each way."""
    return np.array([[0.5], [-0.5]]) if labels == 2 else np.eye(labels)


def _row_space(x: Floats) -> tuple[Floats, Floats]:
    """[rows, hidden] -> the same rows in as many dimensions as there are rows, and their basis.

    A minimum under an L2 penalty has no part outside the rows' span.
    """
    rows, hidden = x.shape
    if rows >= hidden:
        return x, np.eye(hidden)
    basis, coordinates = np.linalg.qr(x.T)  # [hidden, rows], [rows, rows]
    return coordinates.T, basis


def _minimised(
    x: Floats,  # [rows, dims]
    targets: Floats,  # [rows, labels]
    weights: Floats,  # [rows]
    spread: Floats,  # [labels, free]
    strength: float,
    *,
    start: Floats,  # [free, dims + 1]: coefficients and the intercept
) -> Floats:  # [free, dims + 1]
    total = weights.sum()

    def loss(flat: Floats) -> tuple[float, Floats]:
        theta = flat.reshape(start.shape)
        coefficients = theta[:, :-1]
        log_p = log_softmax((x @ coefficients.T + theta[:, -1]) @ spread.T, axis=1)
        missed = weights[:, None] * (np.exp(log_p) - targets)  # [rows, labels]
        by_free = missed @ spread / total
        slope = np.empty_like(theta)
        slope[:, :-1] = by_free.T @ x + coefficients / (strength * total)
        slope[:, -1] = by_free.sum(axis=0)
        entropy = -(weights @ (targets * log_p).sum(axis=1)) / total
        return entropy + (coefficients**2).sum() / (2 * strength * total), slope.ravel()

    options = {"gtol": _TOLERANCE, "ftol": 0.0, "maxiter": _MAX_STEPS}
    found = minimize(loss, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    theta: Floats = found.x.reshape(start.shape)
    return theta


def calibration(
    logits: Floats,  # [rows, labels], of rows that the map was not fitted to
    targets: Floats,  # [rows, labels]
    *,
    offsets: bool,
) -> tuple[float, Floats]:
    """The scale, and with `offsets` each label's offset, under which logits are likeliest.

    A fit that was weighted by label is off by about the log of its weights: offsets undo it.
    """
    rows, labels = logits.shape

    def loss(flat: Floats) -> tuple[float, Floats]:
        scale, offset = np.exp(flat[0]), flat[1:]
        log_p = log_softmax(scale * logits + offset, axis=1)
        missed = (np.exp(log_p) - targets) / rows
        slope = np.concatenate([[scale * (missed * logits).sum()], missed.sum(axis=0)])
        return -(targets * log_p).sum() / rows, slope

    bounds = [(-_LARGEST, _LARGEST), *[(-_LARGEST, _LARGEST) if offsets else (0, 0)] * labels]
    found = minimize(loss, np.zeros(1 + labels), jac=True, method="L-BFGS-B", bounds=bounds).x
    return float(np.exp(found[0])), found[1:]
