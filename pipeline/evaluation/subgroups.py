"""False positives by subgroup: whether a classifier flags some texts more often than others.

Entry point: `false_positive_rates`. Dixon et al., "Measuring and mitigating unintended bias in text
classification" (AIES 2018), compare these rates between the terms of identities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import false_discovery_control, fisher_exact

from pipeline.evaluation.intervals import effective_rows, wilson

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
SIGNIFICANT = 0.05


@dataclass(frozen=True, slots=True)
class SubgroupRate:
    """The false positives of one subgroup, and of all other documents."""

    name: str
    negatives: int  # gold rows of the subgroup that are negative
    false_positives: int  # gold rows
    rate: float | None  # by weight; None without negative documents
    low: float | None  # 95 % interval, Wilson 1927
    high: float | None
    rate_of_others: float | None
    p_value: float  # Fisher's exact test, corrected for the number of subgroups
    flagged: bool  # higher than that of the others, and not by chance


def false_positive_rates(
    truth: Bools,  # [docs]: positive by gold
    predicted: Bools,  # [docs]
    members: Mapping[str, Bools],  # by subgroup: [docs]
    weights: Floats | None = None,  # [docs]: documents that each represents; default: all equal
) -> tuple[SubgroupRate, ...]:
    """The rate of each subgroup, the highest first; those without a negative document are last.

    Intervals and tests are those of the effective numbers of rows. Several subgroups are several
    chances to find a difference: the p-values are those of Benjamini and Hochberg (1995).
    """
    weights = np.ones(len(truth)) if weights is None else weights
    sides = {
        name: [_side(predicted[rows], weights[rows]) for rows in (~truth & of, ~truth & ~of)]
        for name, of in members.items()
    }
    known = {name: pair for name, pair in sides.items() if pair[0].rate is not None}
    p_values = [
        float(fisher_exact([own.table, others.table]).pvalue) for own, others in known.values()
    ]
    corrected = dict(zip(known, false_discovery_control(p_values) if p_values else (), strict=True))
    rates = []
    for name, (own, others) in sides.items():
        if own.rate is None:
            rates.append(SubgroupRate(name, 0, 0, None, None, None, others.rate, 1.0, False))
            continue
        p = float(corrected[name])
        flagged = p < SIGNIFICANT and others.rate is not None and own.rate > others.rate
        counts, interval = (own.rows, own.hits), wilson(own.rate, own.effective)
        rates.append(SubgroupRate(name, *counts, own.rate, *interval, others.rate, p, flagged))
    return tuple(sorted(rates, key=lambda row: (row.rate is None, -(row.rate or 0), row.name)))


class _Side(NamedTuple):
    """The negative documents inside of a subgroup, or outside."""

    rows: int
    hits: int  # false positives
    rate: float | None
    effective: float  # rows

    @property
    def table(self) -> tuple[int, int]:
        """False positives and the others, in effective rows."""
        hits = round((self.rate or 0) * self.effective)
        return hits, round(self.effective) - hits


def _side(predicted: Bools, weights: Floats) -> _Side:
    rate = float(np.average(predicted, weights=weights)) if len(predicted) else None
    return _Side(len(predicted), int(predicted.sum()), rate, effective_rows(weights))
