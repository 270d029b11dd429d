"""A stratified random sample of a corpus, and estimates of the whole corpus from its labels.

Entry points: `strata` and `allocate` before the labels, `estimate` after them.

The estimators are those of survey sampling, which are valid by the design of the sample, even if
the scores are bad: Cochran, "Sampling Techniques" (3rd edition, 1977): bands of equal cumulative
root frequency (5A.7, after Dalenius and Hodges 1959), shares of the sample by size and spread (5.5,
after Neyman 1934), the combined ratio estimator and its linearised variance (6.11, 6.12). Intervals
are Wilson's (1927) at the effective size of the sample (Kott and Carr, "Developing an estimation
strategy for a pesticide data program", Journal of Official Statistics 1997).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as students_t

from pipeline.evaluation.intervals import CONFIDENCE, wilson

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]

_BANDS = 5  # of scores, at most, in each group and decision
_PER_STRATUM = 10  # labels that a stratum should have on average
_BINS = 200  # of a histogram of scores
# A share that is surely above 0 and below 1: strata whose scores are 0 or 1 get labels, too.
_LEAST_SHARE = 0.02
# Labels that are added to those of a stratum when its spread is computed, half of them positive:
# a Beta(1/8, 1/8) prior. Equal labels do not prove that the other documents are equal. In
# simulations of nine corpora, with 0.5 the intervals of precision held the truth in up to 99 %, and
# with 0.1 those of prevalence in as few as 88 %.
_PRIOR = 0.25


@dataclass(frozen=True, slots=True)
class Population:
    """The score, the group and the decision of every text of a corpus."""

    scores: Floats  # [texts]; NaN: none
    groups: Numbers  # [texts]: the number of a group
    dropped: Bools  # [texts]: the decision of a filter


def strata(population: Population, sample: int) -> Numbers:  # [texts]
    """The number of each text's stratum: its decision, its group and a band of its score.

    The largest groups have strata of their own, and the other groups share strata: a stratum should
    have about `_PER_STRATUM` labels.
    """
    codes = np.zeros(len(population.scores), np.int64)
    own_groups = max(1, sample // (2 * _PER_STRATUM * 2))
    sizes = np.bincount(population.groups)
    largest = np.argsort(-sizes, kind="stable")[:own_groups]
    of_group = np.full(len(sizes), own_groups)
    of_group[largest] = np.arange(len(largest))
    cells = of_group[population.groups] * 2 + population.dropped
    names = np.unique(cells)
    bands = int(np.clip(sample // (_PER_STRATUM * len(names)), 1, _BANDS))
    for number, cell in enumerate(names):
        rows = np.flatnonzero(cells == cell)
        codes[rows] = number * _BANDS + _bands(population.scores[rows], bands)
    return np.unique(codes, return_inverse=True)[1]


def _bands(scores: Floats, bands: int) -> Numbers:  # [scores]
    """The band of each score; bands have equal sums of the roots of the histogram's counts."""
    known = scores[np.isfinite(scores)]
    if bands == 1 or not known.size or known.min() == known.max():
        return np.zeros(len(scores), np.int64)
    counts, edges = np.histogram(known, _BINS)
    roots = np.cumsum(np.sqrt(counts))
    inner = np.searchsorted(roots, roots[-1] * np.arange(1, bands) / bands)
    return np.searchsorted(edges[inner + 1], np.where(np.isfinite(scores), scores, edges[0]))


def allocate(population: Population, codes: Numbers, sample: int) -> Numbers:  # [strata]
    """How many texts of each stratum are drawn: two at least, or all of a smaller stratum.

    Kept and dropped texts get half of the sample each. A stratum gets a share by its size and by
    the spread of a label that has its mean score as probability. Scores outside 0 to 1 have no
    spread; then the size alone counts.
    """
    sizes = np.bincount(codes)
    is_dropped = np.bincount(codes, population.dropped) > 0
    scores = population.scores
    is_probability = not ((scores < 0) | (scores > 1)).any()
    means = np.bincount(codes, np.nan_to_num(scores, nan=0.5)) / sizes if is_probability else 0.5
    spread = np.sqrt(np.clip(means * (1 - means), _LEAST_SHARE * (1 - _LEAST_SHARE), None))
    targets = sizes * spread
    drawn = np.minimum(sizes, 2)
    for side in (is_dropped, ~is_dropped):
        # — documents that one side does not need are drawn of the other, by the call below
        _fill(drawn, sizes, targets * side, sample // 2 - int(drawn[side].sum()))
    _fill(drawn, sizes, targets, sample - int(drawn.sum()))
    return drawn


def _fill(drawn: Numbers, sizes: Numbers, targets: Floats, left: int) -> None:
    """Adds `left` to `drawn` in the ratio of `targets`, up to `sizes`."""
    while left > 0:
        free = (drawn < sizes) & (targets > 0)
        if not free.any():
            return
        # — the stratum whose labels are the sparsest, compared with its share
        sparsest = np.where(free, targets / (drawn + 1), -1).argmax()
        drawn[sparsest] += 1
        left -= 1


@dataclass(frozen=True, slots=True)
class LabelledSample:
    """The labelled texts of a sample."""

    codes: Numbers  # [labelled]: the stratum
    documents: Numbers  # [labelled]: documents of the corpus, or of a group, with this text
    dropped: Numbers  # [labelled]: those of them that the filter drops
    positive: Bools  # [labelled]: whether documents with this text should be dropped
    sizes: Mapping[int, int]  # by stratum, texts of the corpus


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share with its interval; all None if the sample gives no estimate of it."""

    estimate: float | None
    low: float | None
    high: float | None
    labels: int  # of documents that the share is of
    more_labels: int | None = None  # for the target half-width; of all documents


NO_ESTIMATE = Estimate(None, None, None, 0)


def estimate(sample: LabelledSample, half_width: float) -> dict[str, Estimate]:
    """Precision, recall and prevalence of the filter on the corpus, with 95 % intervals.

    Precision is the share of dropped documents that should be dropped, recall the share of
    documents that should be dropped that are, and prevalence the share that should be dropped.
    `more_labels` are those for intervals of this half-width.
    """
    unit, dropped = sample.documents, sample.dropped
    none = np.zeros_like(unit)
    shares = {
        "precision": _Share(if_negative=(none, dropped), if_positive=(dropped, dropped)),
        "recall": _Share(if_negative=(none, none), if_positive=(dropped, unit)),
        "prevalence": _Share(if_negative=(none, unit), if_positive=(unit, unit)),
    }
    return {name: _ratio(sample, share, half_width) for name, share in shares.items()}


class _Share(NamedTuple):
    """What each text adds to the part and to the whole, by its label."""

    if_negative: tuple[Numbers, Numbers]
    if_positive: tuple[Numbers, Numbers]


def _ratio(sample: LabelledSample, of: _Share, half_width: float) -> Estimate:
    """The ratio of the two sums over the corpus."""
    (part_if_negative, whole_if_negative), (part_if_positive, whole_if_positive) = of
    strata_, places = np.unique(sample.codes, return_inverse=True)
    drawn = np.bincount(places)
    sizes = np.array([sample.sizes[int(code)] for code in strata_], np.float64)
    weights = (sizes / drawn)[places]
    part = np.where(sample.positive, part_if_positive, part_if_negative)
    whole = np.where(sample.positive, whole_if_positive, whole_if_negative)
    total = float((weights * whole).sum())
    counted = int((whole > 0).sum())
    if total == 0:
        return NO_ESTIMATE
    share = float((weights * part).sum()) / total
    # — the rates of strata with a Beta(_PRIOR / 2, _PRIOR / 2) prior
    positives = np.bincount(places, sample.positive)
    shrunk_rate = ((positives + _PRIOR / 2) / (drawn + _PRIOR))[places]
    weight_positive, weight_negative = weights * shrunk_rate, weights * (1 - shrunk_rate)
    shrunk_total = float(
        (weight_positive * whole_if_positive + weight_negative * whole_if_negative).sum()
    )
    shrunk_share = (
        float((weight_positive * part_if_positive + weight_negative * part_if_negative).sum())
        / shrunk_total
    )
    if_negative = (part_if_negative - shrunk_share * whole_if_negative) / shrunk_total
    if_positive = (part_if_positive - shrunk_share * whole_if_positive) / shrunk_total
    mean = _by_stratum(places, drawn, shrunk_rate * if_positive + (1 - shrunk_rate) * if_negative)
    square = _by_stratum(
        places, drawn, shrunk_rate * if_positive**2 + (1 - shrunk_rate) * if_negative**2
    )
    spread = np.maximum(square - mean**2, 0) * drawn / np.maximum(drawn - 1, 1)
    variance = float((sizes**2 * (1 - drawn / sizes) * spread / drawn).sum())
    freedom = max(1, int(drawn.sum()) - len(drawn))
    quantile = float(students_t.ppf((1 + CONFIDENCE) / 2, freedom))
    if variance == 0:  # all documents are labelled
        return Estimate(share, share, share, counted, 0)
    low, high = wilson(share, shrunk_share * (1 - shrunk_share) / variance, quantile)
    width = (high - low) / 2
    labels = int(drawn.sum())
    more = max(0, min(ceil(labels * (width / half_width) ** 2), int(sizes.sum())) - labels)
    return Estimate(share, low, high, counted, more)


def _by_stratum(places: Numbers, drawn: Numbers, values: Floats) -> Floats:  # [strata]
    return np.bincount(places, values) / drawn
