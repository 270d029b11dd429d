"""False positives by subgroup: whether a classifier flags some texts more often than others.

Entry point: `false_positive_rates`. Dixon et al., "Measuring and mitigating unintended bias in text
classification" (AIES 2018), compare these rates between the terms of identities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, false_discovery_control, fisher_exact

Bools = NDArray[np.bool_]
SIGNIFICANT = 0.05


@dataclass(frozen=True, slots=True)
class SubgroupRate:
    """The false positives of one subgroup, and of all other documents."""

    name: str
    negatives: int  # documents of the subgroup that gold says are negative
    false_positives: int
    rate: float | None  # None without negative documents
    low: float | None  # 95 % interval, Wilson 1927
    high: float | None
    rate_of_others: float | None
    p_value: float  # Fisher's exact test, corrected for the number of subgroups
    flagged: bool  # higher than that of the others, and not by chance


def false_positive_rates(
    truth: Bools,  # [docs]: positive by gold
    predicted: Bools,  # [docs]
    members: Mapping[str, Bools],  # by subgroup: [docs]
) -> tuple[SubgroupRate, ...]:
    """The rate of each subgroup, the highest first; those without a negative document are last.

    Several subgroups are several chances to find a difference: the p-values are those of Benjamini
    and Hochberg (1995).
    """
    counts: dict[str, tuple[int, int, int, int]] = {}  # own hits and negatives, those of others
    for name, inside in members.items():
        own, others = ~truth & inside, ~truth & ~inside
        hits, other_hits = int(predicted[own].sum()), int(predicted[others].sum())
        counts[name] = hits, int(own.sum()), other_hits, int(others.sum())
    known = {name: count for name, count in counts.items() if count[1]}
    tables = [[[a, b - a], [c, d - c]] for a, b, c, d in known.values()]
    p_values = [float(fisher_exact(table).pvalue) for table in tables]
    corrected = dict(zip(known, false_discovery_control(p_values) if p_values else (), strict=True))
    rates = []
    for name, (hits, size, other_hits, other_size) in counts.items():
        of_others = other_hits / other_size if other_size else None
        if not size:
            rates.append(SubgroupRate(name, 0, 0, None, None, None, of_others, 1.0, False))
            continue
        interval = binomtest(hits, size).proportion_ci(method="wilson")
        p, rate = float(corrected[name]), hits / size
        flagged = p < SIGNIFICANT and of_others is not None and rate > of_others
        low, high = float(interval.low), float(interval.high)
        rates.append(SubgroupRate(name, size, hits, rate, low, high, of_others, p, flagged))
    return tuple(sorted(rates, key=lambda row: (row.rate is None, -(row.rate or 0), row.name)))
