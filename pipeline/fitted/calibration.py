"""Calibrations: maps from a task's raw probabilities to calibrated ones, and their file.

Entry points: `Calibration.apply`, and `parse_calibration`, which reads the file. `verbs.calibrate`
fits them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.hashes import canonical_json, parse_versioned_json, short_hash, validated

FORMAT = 1
Probabilities = NDArray[np.float64]  # [docs, labels], each row summing to 1

# The smallest normal float32. Raw probabilities are float32: below it they are 0.
SMALLEST_P = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Prior:
    """Divides by each label's prior probability, and normalises.

    The prior of batch calibration (Zhou et al. 2023, "Batch Calibration") is the mean answer about
    the corpus.
    """

    prior: tuple[float, ...]  # [labels]

    def __post_init__(self) -> None:
        if not all(0 <= share <= 1 for share in self.prior) or not any(self.prior):
            raise ValueError(f"a prior has one probability for each label (got {self.prior})")

    def apply(self, p: Probabilities) -> Probabilities:
        _docs, labels = p.shape
        assert labels == len(self.prior), (labels, self.prior)
        prior = np.array(self.prior)
        # — a label with prior 0 is raised as much as the label with the smallest prior above 0
        return _normalised(p / np.maximum(prior, prior[prior > 0].min()))


@dataclass(frozen=True, slots=True)
class Temperature:
    """Divides log-probabilities by a number (Guo et al. 2017, "On Calibration of ...").

    The order of the labels stays. Above 1, answers become less confident; below 1, more.
    """

    temperature: float

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"a temperature is above 0 and finite (got {self.temperature})")

    def apply(self, p: Probabilities) -> Probabilities:
        scaled = log_p(p) / self.temperature  # [docs, labels]
        return _normalised(np.exp(scaled - scaled.max(axis=1, keepdims=True)))


@dataclass(frozen=True, slots=True)
class Curve:
    """A non-decreasing piecewise linear function, constant outside its knots."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        knots = len(self.x), len(self.y)
        if not self.x or knots[0] != knots[1] or not all(map(math.isfinite, self.x + self.y)):
            raise ValueError(f"a curve has equally many finite x and y (got {knots})")
        if any(np.diff(self.x) <= 0) or any(np.diff(self.y) < 0):
            raise ValueError("the x of a curve rise, and its y do not fall")
        if self.y[0] < 0 or self.y[-1] > 1:
            raise ValueError(
                f"the y of a curve are probabilities (got {self.y[0]} to {self.y[-1]})"
            )


@dataclass(frozen=True, slots=True)
class Isotonic:
    """A curve for each label against the others, and normalises.

    Zadrozny & Elkan 2002, "Transforming Classifier Scores into Accurate Multiclass Probability
    Estimates". As in scikit-learn, all labels are equal if every curve gives 0; of two labels, the
    curve is of the second, and the first gets the rest.
    """

    curves: tuple[Curve, ...]  # [labels]; one if the task has two labels

    def apply(self, p: Probabilities) -> Probabilities:
        _docs, labels = p.shape
        assert len(self.curves) == curves_for(labels), (labels, len(self.curves))
        read = p[:, labels - len(self.curves) :]
        mapped = np.stack([np.interp(read[:, i], c.x, c.y) for i, c in enumerate(self.curves)], 1)
        return _normalised(mapped) if labels > 2 else np.concatenate([1 - mapped, mapped], 1)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A calibration of a list of labels. Law: rows that sum to 1 still do afterwards."""

    method: str  # one of METHODS
    labels: tuple[str, ...]
    parameters: Prior | Temperature | Isotonic

    def __post_init__(self) -> None:
        parameters, labels = self.parameters, len(self.labels)
        if isinstance(parameters, Prior) and len(parameters.prior) != labels:
            raise ValueError(f"a prior of {len(parameters.prior)} labels for {labels} labels")
        if isinstance(parameters, Isotonic) and len(parameters.curves) != curves_for(labels):
            raise ValueError(f"{len(parameters.curves)} curves for {labels} labels")

    def apply(self, p: Probabilities) -> Probabilities:
        """[docs, labels] -> [docs, labels], in the labels' order."""
        _docs, labels = p.shape
        assert labels == len(self.labels), (labels, self.labels)
        return self.parameters.apply(p)

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)

    @property
    def hash(self) -> str:
        """Changes exactly when the calibration does."""
        return short_hash(canonical_json(self.to_json()))


METHODS: Mapping[str, type[Prior | Temperature | Isotonic]] = {
    "batch": Prior,
    "temperature": Temperature,
    "isotonic": Isotonic,
}


@dataclass(frozen=True, slots=True)
class CalibrationFile:
    """A calibration and its origin."""

    task: str
    calibration: Calibration
    fingerprint: str  # of the raw answers that it was fitted to
    source: Mapping[str, Any]  # {"snapshot": number}, with {"gold": its SHA-256} for a gold set
    rows: int

    def json(self) -> bytes:
        """The file's content: the same bytes for the same values."""
        content = {"format": FORMAT, **asdict(self)}
        calibration = content.pop("calibration")
        return canonical_json({**content, **calibration}) + b"\n"


def parse_calibration(data: bytes) -> CalibrationFile:
    """The file that `CalibrationFile.json` wrote; ValueError names what is wrong."""
    content = parse_versioned_json(data, FORMAT)
    kind = METHODS.get(str(content.get("method")))
    if kind is None:
        raise ValueError(f"no such method: {content.get('method')!r}")
    parameters = validated(kind, content.get("parameters"))
    calibration = validated(Calibration, {**content, "parameters": parameters})
    return validated(CalibrationFile, {**content, "calibration": calibration})


def curves_for(labels: int) -> int:
    """The number of curves of an isotonic calibration."""
    return 1 if labels == 2 else labels


def mean_prior(p: Probabilities) -> Prior:
    """The mean probability of each label."""
    return Prior(tuple(float(share) for share in p.mean(axis=0, dtype=np.float64)))


def log_p(p: Probabilities) -> Probabilities:
    """Finite logarithms: smaller probabilities count as `SMALLEST_P`."""
    logarithms: Probabilities = np.log(np.maximum(p, SMALLEST_P))
    return logarithms


def _normalised(weights: Probabilities) -> Probabilities:
    """Rows that sum to 1; a row of zeros becomes uniform."""
    _docs, labels = weights.shape
    sums = weights.sum(axis=1, keepdims=True)  # [docs, 1]
    normalised: Probabilities = np.full_like(weights, 1 / labels)
    np.divide(weights, sums, out=normalised, where=sums > 0)
    return normalised
