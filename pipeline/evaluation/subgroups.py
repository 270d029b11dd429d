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
    rate: float
    low: float  # 95 % interval, Wilson 1927
    high: float
    rate_of_others: float
    p_value: float  # Fisher's exact test, corrected for the number of subgroups
    flagged: bool  # higher than that of the others, and not by chance


def false_positive_rates(
    truth: Bools,  # [docs]: positive by gold
    predicted: Bools,  # [docs]
    members: Mapping[str, Bools],  # by subgroup: [docs]
) -> tuple[SubgroupRate, ...]:
    """The rate of each subgroup with a negative document, the highest first.

    Several subgroups are several chances to find a difference: the p-values are those of Benjamini
    and Hochberg (1995).
    """
    negative = ~truth
    found: list[tuple[str, int, int, float, float]] = []
    for name, inside in members.items():
        own, others = negative & inside, negative & ~inside
        if not own.any():
            continue
        hits, other_hits = int(predicted[own].sum()), int(predicted[others].sum())
        sizes = int(own.sum()), int(others.sum())
        table = [[hits, sizes[0] - hits], [other_hits, sizes[1] - other_hits]]
        p_value = float(fisher_exact(table).pvalue)
        found.append((name, sizes[0], hits, other_hits / max(1, sizes[1]), p_value))
    corrected = false_discovery_control([each[-1] for each in found]) if found else []
    rates = []
    for (name, size, hits, of_others, _), p in zip(found, corrected, strict=True):
        interval = binomtest(hits, size).proportion_ci(method="wilson")
        flagged = bool(p < SIGNIFICANT and hits / size > of_others)
        low, high = float(interval.low), float(interval.high)
        rates.append(
            SubgroupRate(name, size, hits, hits / size, low, high, of_others, float(p), flagged)
        )
    return tuple(sorted(rates, key=lambda each: (-each.rate, each.name)))
