"""Intervals equal scipy's where it has them, and none is without width."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binomtest
from scipy.stats import t as student

from pipeline.evaluation.intervals import auroc_interval, mean_figure, unseen_share, wilson
from pipeline.evaluation.metrics import HEADLINES, score


@pytest.mark.parametrize("hits, rows", [(0, 12), (12, 12), (7, 12), (499, 500), (1, 1)])
def test_wilsons_interval_is_that_of_scipy(hits: int, rows: int) -> None:
    expected = binomtest(hits, rows).proportion_ci(method="wilson")
    assert wilson(hits / rows, rows) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize("rows", [1, 12, 500])
def test_the_unseen_share_is_the_bound_of_clopper_and_pearson_for_a_count_of_0(rows: int) -> None:
    assert unseen_share(rows) == pytest.approx(beta.ppf(0.975, 1, rows), abs=1e-12)


@given(data=st.data(), rows=st.integers(1, 25), labels=st.integers(2, 4))
def test_no_interval_is_without_width(data: st.DataObject, rows: int, labels: int) -> None:
    source = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    truth = source.integers(0, data.draw(st.integers(1, labels)), rows)
    p = source.dirichlet(np.ones(labels), rows)
    if data.draw(st.booleans()):
        p = p[np.zeros(rows, int)]  # all answers are equal
    if data.draw(st.booleans()):
        p = np.eye(labels)[truth]  # all are right, and sure
    scores = score(truth, p, [str(n) for n in range(labels)], resamples=50)
    for name in HEADLINES:
        figure = scores.headlines[name]
        if figure.low is not None and figure.high is not None:
            assert 0 <= figure.low < figure.high <= 1 + 1e-9, name
    for label in scores.labels:
        for low, high in label.intervals.values():
            assert 0 <= low < high <= 1


@pytest.mark.parametrize("value, positives, negatives", [(0.9, 10, 90), (0.5, 30, 30), (1, 6, 50)])
def test_an_end_of_the_interval_of_auroc_is_a_quantile_of_its_own_error_away(
    value: float, positives: int, negatives: int
) -> None:
    """The standard error of Hanley and McNeil (1982), with the mean number of rows."""
    quantile, mean = student.ppf(0.975, min(positives, negatives) - 1), (positives + negatives) / 2
    for end in auroc_interval(value, positives, negatives):
        if end in (0, 1):
            continue
        q1, q2 = end / (2 - end), 2 * end**2 / (1 + end)
        spread = end * (1 - end) + (mean - 1) * (q1 - end**2 + q2 - end**2)
        error = np.sqrt(spread / (positives * negatives))
        assert abs(value - end) == pytest.approx(quantile * error, rel=1e-6)


def test_the_interval_of_a_mean_stays_at_or_above_the_least_value() -> None:
    few = np.array([0.001, 0.002, 3.0])
    assert mean_figure(few).low < 0  # type: ignore[operator]
    assert mean_figure(few, least=0).low == 0
    assert mean_figure(few, least=0).high == mean_figure(few).high
