"""Stratified samples of corpora whose every label is known."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom, binomtest
from sklearn.metrics import precision_score, recall_score

from pipeline.evaluation.survey import (
    Estimate,
    LabelledSample,
    Population,
    allocate,
    estimate,
    strata,
)

SAMPLES = 250
MEASURES = ("precision", "recall", "prevalence")


def corpus(texts: int, rate: float, skill: float) -> tuple[Population, NDArray[np.bool_]]:
    """Scores that are the probabilities of their labels, in three groups."""
    random = np.random.default_rng(int(texts * rate))
    positive = random.random(texts) < rate
    signal = random.normal(positive * skill, 1)
    scores = 1 / (1 + np.exp(-skill * (signal - skill / 2)) * (1 - rate) / rate)
    return Population(scores, np.arange(texts) % 3, scores > 0.5), positive


def missed(texts: int) -> tuple[Population, NDArray[np.bool_]]:
    """Scores that separate only dropped texts from kept ones, of which a few should be dropped."""
    random = np.random.default_rng(texts)
    dropped = random.random(texts) < 0.3
    positive = random.random(texts) < np.where(dropped, 0.99, 0.02)
    sure = np.where(dropped, random.beta(8, 1, texts), random.beta(1, 12, texts))
    return Population((sure + dropped) / 2, np.zeros(texts, np.int64), dropped), positive


def drawn(
    population: Population, positive: NDArray[np.bool_], size: int, seed: int
) -> LabelledSample:
    codes = strata(population, size)
    sizes = np.bincount(codes)
    random = np.random.default_rng(seed)
    each = enumerate(allocate(population, codes, size).tolist())
    rows = np.concatenate(
        [random.choice(np.flatnonzero(codes == code), n, replace=False) for code, n in each]
    )
    return LabelledSample(
        codes=codes[rows],
        documents=np.ones(len(rows), np.int64),
        dropped=population.dropped[rows].astype(np.int64),
        positive=positive[rows],
        sizes=dict(enumerate(sizes.tolist())),
    )


def truth_of(population: Population, positive: NDArray[np.bool_]) -> dict[str, float]:
    return {
        "precision": precision_score(positive, population.dropped),
        "recall": recall_score(positive, population.dropped),
        "prevalence": positive.mean(),
    }


def holds(of: Estimate, value: float) -> bool:
    assert of.low is not None and of.high is not None and of.estimate is not None
    assert 0 <= of.low <= of.estimate <= of.high <= 1
    return of.low <= value <= of.high


@pytest.mark.parametrize(
    ("population", "positive"),
    [
        pytest.param(*corpus(2_000, 0.5, 2.0), id="half"),
        pytest.param(*corpus(10_000, 0.1, 2.5), id="skilled"),
        pytest.param(*corpus(10_000, 0.1, 1.5), id="less skilled", marks=pytest.mark.slow),
        pytest.param(*missed(10_000), id="missed"),
    ],
)
def test_the_intervals_contain_the_truth_as_often_as_their_confidence(
    population: Population, positive: NDArray[np.bool_]
) -> None:
    """The bound is the lower end of a binomial count's 99.9 % range around .92."""
    truth = truth_of(population, positive)
    counts = dict.fromkeys(MEASURES, 0)
    sums = dict.fromkeys(MEASURES, 0.0)
    for seed in range(SAMPLES):
        estimates = estimate(drawn(population, positive, 200, seed), 0.05)
        for name, of in estimates.items():
            counts[name] += holds(of, truth[name])
            sums[name] += (of.estimate or 0) / SAMPLES
    least = binom.ppf(0.001, SAMPLES, 0.92)
    assert min(counts.values()) >= least, counts
    # — unbiased, up to the ratio's bias, which is of the order of 1 / 200
    assert sums == pytest.approx(truth, abs=0.02)


def test_the_mean_over_all_samples_is_the_truth() -> None:
    """Every possible sample of two strata: the estimator of a share of all texts is unbiased."""
    positive = np.array([True, False, True, False, False, True, True, False])
    codes = np.array([0, 0, 0, 1, 1, 1, 1, 1])
    estimates = []
    for first, second in product(combinations(range(3), 2), combinations(range(3, 8), 3)):
        rows = np.array([*first, *second])
        labelled = LabelledSample(
            codes[rows], np.ones(5, np.int64), np.ones(5, np.int64), positive[rows], {0: 3, 1: 5}
        )
        estimates.append(estimate(labelled, 0.05)["prevalence"].estimate)
    assert np.mean(estimates) == pytest.approx(positive.mean(), abs=1e-12)


def test_a_sample_of_all_texts_gives_the_truth_with_copies_of_other_decisions() -> None:
    population, positive = corpus(500, 0.3, 1.5)
    random = np.random.default_rng(0)
    documents = random.integers(0, 5, 500)  # — none: all of the text's are in other groups
    dropped = random.integers(0, documents + 1)
    codes = strata(population, 100)
    sizes = dict(enumerate(np.bincount(codes).tolist()))
    y = np.repeat(positive, documents)
    d = np.concatenate([np.arange(n) < k for n, k in zip(documents, dropped, strict=True)])
    for rows in (slice(None), population.groups == 1):
        inside = np.zeros(500, np.int64)
        inside[rows] = 1
        of = estimate(
            LabelledSample(codes, documents * inside, dropped * inside, positive, sizes), 0.05
        )
        part = np.repeat(inside > 0, documents)
        assert of["precision"].estimate == pytest.approx(precision_score(y[part], d[part]))
        assert of["recall"].estimate == pytest.approx(recall_score(y[part], d[part]))
        assert of["prevalence"].estimate == pytest.approx(y[part].mean())
        assert all(each.low == each.estimate == each.high for each in of.values())
        assert all(each.more_labels == 0 for each in of.values())


@pytest.mark.parametrize("positives", [3, 40, 150])
def test_of_a_simple_random_sample_the_interval_is_wilsons(positives: int) -> None:
    """Of a large corpus; the imagined quarter label and the quantile of t account for 1 %."""
    positive = np.arange(300) < positives
    zeros = np.zeros(300, np.int64)
    of = estimate(LabelledSample(zeros, zeros + 1, zeros, positive, {0: 10**9}), 0.05)["prevalence"]
    wilson = binomtest(positives, 300).proportion_ci(method="wilson")
    assert of.low == pytest.approx(wilson.low, rel=0.01)
    assert of.high == pytest.approx(wilson.high, rel=0.01)


def test_the_further_labels_reach_the_target_width() -> None:
    population, positive = corpus(50_000, 0.2, 1.5)
    first = estimate(drawn(population, positive, 200, 0), 0.04)["precision"]
    assert first.more_labels is not None and first.more_labels > 100
    whole = drawn(population, positive, 200 + first.more_labels, 1)
    then = estimate(whole, 0.04)["precision"]
    assert then.low is not None and then.high is not None
    assert (then.high - then.low) / 2 == pytest.approx(0.04, rel=0.1)


def test_nothing_dropped_or_positive_is_no_estimate() -> None:
    zeros = np.zeros(20, np.int64)
    sample = LabelledSample(zeros, zeros + 1, zeros, zeros > 0, {0: 100})
    of = estimate(sample, 0.05)
    assert of["precision"].estimate is None and of["recall"].estimate is None
    assert of["prevalence"].estimate == 0 and (of["prevalence"].high or 0) > 0.05


@pytest.mark.parametrize("sample", [20, 60, 200, 1_000])
@pytest.mark.parametrize("scores", ["p", "any", "equal", "none"])
def test_every_stratum_has_two_labels_and_the_sample_is_full(scores: str, sample: int) -> None:
    population, _ = corpus(3_000, 0.1, 2.0)
    changed = {
        "p": population.scores,
        "any": population.scores * 100 - 7,
        "equal": np.full(3_000, 0.25),
        "none": np.full(3_000, np.nan),
    }[scores]
    population = Population(changed, population.groups, population.dropped)
    codes = strata(population, sample)
    sizes = np.bincount(codes)
    chosen = allocate(population, codes, sample)
    assert (chosen >= np.minimum(sizes, 2)).all() and (chosen <= sizes).all()
    assert chosen.sum() == sample
    # — a stratum is of one decision; half of the sample is of each, if there are as many
    of_dropped = np.bincount(codes, population.dropped)
    assert set(of_dropped[of_dropped > 0]) == set(sizes[of_dropped > 0])
    half = min(sample // 2, int(population.dropped.sum()))
    assert chosen[of_dropped > 0].sum() == pytest.approx(half, abs=1)
