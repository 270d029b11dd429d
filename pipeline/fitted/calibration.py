"""A calibration: what turns a task's raw probabilities into calibrated ones, and back from JSON.

Knows probabilities. Knows nothing of where they come from, of files, or of how curves are fitted
(`calibration_fitting`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Probabilities = NDArray[np.float64]  # [docs, labels], each row summing to 1

# The smallest normal float32: raw probabilities are float32, and below it they are 0.
SMALLEST_P = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Prior:
    """Divides by what each label gets anyhow, and lets the rows sum to 1 again.

    Contextual calibration (Zhao et al. 2021, "Calibrate Before Use") takes for it the mean answer
    about documents without content; batch calibration (Zhou et al. 2023, "Batch Calibration") the
    mean answer about the corpus.
    """

    prior: tuple[float, ...]  # [labels]

    def __post_init__(self) -> None:
        if not all(0 <= share <= 1 for share in self.prior) or not any(self.prior):
            raise ValueError(f"a prior is a probability for each label, not {self.prior}")

    def apply(self, p: Probabilities) -> Probabilities:
        _docs, labels = p.shape
        assert labels == len(self.prior), (labels, self.prior)
        prior = np.array(self.prior)
        # — a label that never came is raised no more than the rarest that did
        return _normalised(p / np.maximum(prior, prior[prior > 0].min()))


@dataclass(frozen=True, slots=True)
class Temperature:
    """Divides log-probabilities by one number (Guo et al. 2017, "On Calibration of ...").

    The order of the labels stays; above 1 answers become less sure, below 1 surer.
    """

    temperature: float

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"a temperature is above 0 and finite, not {self.temperature}")

    def apply(self, p: Probabilities) -> Probabilities:
        scaled = log_p(p) / self.temperature  # [docs, labels]
        return _normalised(np.exp(scaled - scaled.max(axis=1, keepdims=True)))


@dataclass(frozen=True, slots=True)
class Curve:
    """A rising line through knots, flat beyond them."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        knots = len(self.x), len(self.y)
        if not self.x or knots[0] != knots[1] or not all(map(math.isfinite, self.x + self.y)):
            raise ValueError(f"a curve is as many finite x as y, not {knots}")
        if any(np.diff(self.x) <= 0) or any(np.diff(self.y) < 0):
            raise ValueError("a curve's x rise, and its y do not fall")
        if self.y[0] < 0 or self.y[-1] > 1:
            raise ValueError(f"a curve gives probabilities, not {self.y[0]} to {self.y[-1]}")


@dataclass(frozen=True, slots=True)
class Isotonic:
    """A rising curve for each label against the others, and rows that sum to 1 again.

    Zadrozny & Elkan 2002, "Transforming Classifier Scores into Accurate Multiclass Probability
    Estimates". As scikit-learn has it, where every curve gives 0 all labels are alike, and of two
    labels the second has the one curve, the first what is left.
    """

    curves: tuple[Curve, ...]  # [labels]; one where there are two labels

    def apply(self, p: Probabilities) -> Probabilities:
        _docs, labels = p.shape
        assert len(self.curves) == curves_for(labels), (labels, len(self.curves))
        read = p[:, labels - len(self.curves) :]
        mapped = np.stack([np.interp(read[:, i], c.x, c.y) for i, c in enumerate(self.curves)], 1)
        return _normalised(mapped) if labels > 2 else np.concatenate([1 - mapped, mapped], 1)


@dataclass(frozen=True, slots=True)
class Calibration:
    """One way to calibrate one closed list of labels. Law: rows that sum to 1 come out so."""

    method: str  # contextual, batch, temperature or isotonic
    labels: tuple[str, ...]
    change: Prior | Temperature | Isotonic

    def apply(self, p: Probabilities) -> Probabilities:
        """[docs, labels] -> [docs, labels], in the labels' order."""
        _docs, labels = p.shape
        assert labels == len(self.labels), (labels, self.labels)
        return self.change.apply(p)

    def to_json(self) -> dict[str, Any]:
        """What `calibration_from_json` makes the same calibration of, to the last bit."""
        parameters = asdict(self.change)
        return {"method": self.method, "labels": list(self.labels), "parameters": parameters}


def calibration_from_json(content: Mapping[str, Any]) -> Calibration:
    """The calibration that `to_json` told; ValueError, KeyError or TypeError if it is none."""
    method, labels = content["method"], tuple(map(str, content["labels"]))
    change = _change(method, content["parameters"])
    if isinstance(change, Prior) and len(change.prior) != len(labels):
        raise ValueError(f"a prior of {len(change.prior)} labels for {len(labels)}")
    if isinstance(change, Isotonic) and len(change.curves) != curves_for(len(labels)):
        raise ValueError(f"{len(change.curves)} curves for {len(labels)} labels")
    return Calibration(method, labels, change)


def curves_for(labels: int) -> int:
    """How many curves an isotonic calibration of so many labels has."""
    return 1 if labels == 2 else labels


def mean_prior(p: Probabilities) -> Prior:
    """What each label gets on average."""
    return Prior(tuple(float(share) for share in p.mean(axis=0, dtype=np.float64)))


def log_p(p: Probabilities) -> Probabilities:
    """Logarithms, of which none is infinite."""
    logarithms: Probabilities = np.log(np.maximum(p, SMALLEST_P))
    return logarithms


def _change(method: str, parameters: Mapping[str, Any]) -> Prior | Temperature | Isotonic:
    if method in ("contextual", "batch"):
        return Prior(_floats(parameters["prior"]))
    if method == "temperature":
        return Temperature(float(parameters["temperature"]))
    if method == "isotonic":
        curves = (Curve(_floats(c["x"]), _floats(c["y"])) for c in parameters["curves"])
        return Isotonic(tuple(curves))
    raise ValueError(f"no such method: {method!r}")


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(map(float, values))


def _normalised(weights: Probabilities) -> Probabilities:
    """Rows that sum to 1; a row of zeros becomes uniform."""
    _docs, labels = weights.shape
    sums = weights.sum(axis=1, keepdims=True)  # [docs, 1]
    normalised: Probabilities = np.full_like(weights, 1 / labels)
    np.divide(weights, sums, out=normalised, where=sums > 0)
    return normalised
