"""Gold rows whose label is most likely wrong: confident learning (Northcutt et al., 2021).

A label's threshold is the mean probability it gets where the gold says it. A row is suspected if,
its answer is not the gold's and, of the labels whose threshold its probabilities reach, the most
likely is not either. Knows numbers. Knows nothing of what rows or labels are called.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.evaluation.metrics import Floats, Ints

# Of float32 sums: a label's mean over equal probabilities may lie above each of them.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Mislabelled:
    """One suspected row, and the label that the answers point to."""

    row: int
    given: int
    likely: int
    p_given: float
    p_likely: float


def mislabelled(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]; not of a model that was fitted to these rows
) -> tuple[Mislabelled, ...]:
    """The suspected rows, by how much more likely the other label is: the surest first."""
    rows, labels = p.shape
    p_given = p[np.arange(rows), truth]
    thresholds = np.full(labels, np.inf)
    for label in np.unique(truth):
        thresholds[label] = p[truth == label, label].mean()
    reached = np.where(p >= thresholds - _ROUNDING, p, -1.0)
    likely = reached.argmax(axis=1)
    answered_otherwise = p.max(axis=1) > p_given
    suspected = np.flatnonzero((reached.max(axis=1) >= 0) & (likely != truth) & answered_otherwise)
    margin = p_given[suspected] - p[suspected, likely[suspected]]
    return tuple(
        Mislabelled(
            int(row),
            int(truth[row]),
            int(likely[row]),
            float(p_given[row]),
            float(p[row, likely[row]]),
        )
        for row in suspected[np.argsort(margin, kind="stable")]
    )
