"""Figures of scores and of several labels at once: scikit-learn's and scipy's, of each resample."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import cohen_kappa_score, f1_score

from pipeline.evaluation.metrics import LabelRows, means_over_labels, score
from pipeline.evaluation.ordinal import kappas, rank_correlations
from pipeline.evaluation.resampling import draws

ROWS = 80
SOURCE = np.random.default_rng(4)
VALUES = (0.0, 1.0, 2.0, 3.0)
TRUTH = SOURCE.integers(0, 4, ROWS)
LOGITS = SOURCE.normal(size=(ROWS, 4)) + 1.5 * np.eye(4)[TRUTH]
P = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
EXACT = {"rel": 0, "abs": 1e-12}


def test_every_resample_is_measured_as_the_rows_that_it_holds() -> None:
    counts = draws(np.random.default_rng(0), 20, ROWS)
    # — rounded: equal values share their ranks
    predicted, expected = P.argmax(axis=1).astype(float), (P @ np.array(VALUES)).round(1)
    kappa = kappas(TRUTH.astype(float), predicted, counts)
    rank = rank_correlations(TRUTH.astype(float), expected, counts)
    for number, count in enumerate(counts):
        rows = np.repeat(np.arange(ROWS), count.astype(int))
        own = cohen_kappa_score(TRUTH[rows], predicted[rows], weights="quadratic")
        assert kappa[number] == pytest.approx(own, **EXACT)
        own = spearmanr(TRUTH[rows], expected[rows]).statistic
        assert rank[number] == pytest.approx(own, **EXACT)


def test_equal_numbers_have_no_kappa_and_no_rank_but_an_error() -> None:
    p = np.tile([0.1, 0.2, 0.3, 0.4], (5, 1))
    figures = score(np.full(5, 3), p, list("0123"), values=VALUES, resamples=10).headlines
    assert figures["qwk"].value is None and figures["spearman"].value is None
    assert figures["mae"].value == pytest.approx(1.0, **EXACT)


def test_a_label_is_judged_by_its_own_rows() -> None:
    own = np.arange(0, ROWS, 2)
    applies, p = SOURCE.random(ROWS) < 0.5, SOURCE.random(ROWS)
    every = LabelRows(np.arange(ROWS), applies, p)
    some = LabelRows(own, ~applies[own], p[own])
    value = means_over_labels([every, some], ROWS, resamples=10)["macro_f1"].value
    f1 = [f1_score(applies, p >= 0.5), f1_score(~applies[own], p[own] >= 0.5)]
    assert value == pytest.approx(np.mean(f1), **EXACT)
