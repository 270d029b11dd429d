"""The thresholds of a cascade, and their file.

Entry points: `Thresholds`, and `parse_thresholds`, which reads the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.hashes import canonical_json, parse_versioned_json, validated

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a stage before the last decides, and what the thresholds were chosen for."""

    task: str
    labels: tuple[str, str]
    positive: str  # the label that recall and precision are of
    stages: tuple[str, ...]  # the stages' fingerprints
    low: float  # a stage decides against the label at this probability of it, or below; under .5
    high: float  # and for the label at this probability, or above; over .5
    source: Mapping[str, Any] = field(default_factory=dict)  # the promise, and the sample

    def __post_init__(self) -> None:
        if self.positive not in self.labels:
            raise ValueError(f"{self.positive!r} is not one of its labels")
        if not self.low < 0.5 < self.high:
            raise ValueError(f"its thresholds {self.low:g} and {self.high:g} are not around 0.5")

    def decides(self, p: NDArray[np.floating]) -> NDArray[np.bool_]:  # [docs, labels] -> [docs]
        """Whether a stage before the last decides a document with these probabilities."""
        of_positive = p[:, self.labels.index(self.positive)]
        decided: NDArray[np.bool_] = (of_positive <= self.low) | (of_positive >= self.high)
        return decided

    @property
    def content(self) -> dict[str, Any]:
        """What can change an answer: the thresholds and the stages."""
        kept = ("positive", "stages", "low", "high")
        return {name: value for name, value in asdict(self).items() if name in kept}

    def json(self) -> bytes:
        """The file's content: the same bytes for the same values."""
        return canonical_json({"format": FORMAT, **asdict(self)}) + b"\n"


def parse_thresholds(data: bytes) -> Thresholds:
    """The thresholds that `Thresholds.json` wrote; ValueError names what is wrong."""
    return validated(Thresholds, parse_versioned_json(data, FORMAT))
