"""The simulated person and the statistics of the benchmark of annotators."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import wilcoxon

from benchmarks import annotators
from benchmarks.annotators import LABELS, ORDERS, Labelled, Simulation, erring, holm, losses


def test_holm_multiplies_by_the_number_of_tests_that_are_left() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.9, 0.6]) == pytest.approx([1, 1])


def test_losses_compare_mixed_with_random_by_seed() -> None:
    values = np.random.default_rng(0).random((len(ORDERS), 20, len(LABELS)))
    mixed, random = (values[ORDERS.index(name)] for name in ("mixed", "random"))
    mixed[:, 1] = random[:, 1]
    results = list(losses({"a set": values}))
    assert [name for name, _, _ in results] == [f"a set, {n} labels" for n in LABELS]
    assert results[1][1:] == (0, 1)
    _, apart, p = results[2]
    assert apart == pytest.approx((mixed[:, 2] - random[:, 2]).mean())
    assert p == pytest.approx(wilcoxon(mixed[:, 2], random[:, 2]).pvalue)


@pytest.mark.parametrize("labels", [2, 5])
def test_a_person_errs_at_the_rate_and_always_the_same_way(labels: int) -> None:
    truth = np.arange(20_000) % labels
    answers = erring(truth, 0.1, seed=3)
    assert (answers != truth).mean() == pytest.approx(0.1, abs=0.008)
    wrong = (answers - truth)[answers != truth] % labels
    assert np.bincount(wrong)[1:] == pytest.approx(2_000 / (labels - 1), rel=0.15)
    assert np.array_equal(answers, erring(truth, 0.1, seed=3))
    assert not np.array_equal(answers, erring(truth, 0.1, seed=4))
    assert np.array_equal(erring(truth, 0, seed=3), truth)


def test_all_orders_learn_what_the_states_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 documents half are judged."""
    monkeypatch.setattr(annotators, "LABELS", (20, 40))
    source = np.random.default_rng(1)
    truth = source.integers(0, 2, 80)
    states = source.normal(size=(80, 2, 8)).astype(np.float32)
    states += 4 * truth[:, None, None]
    texts = [f"document {n} about {'law' if of else 'art'}" for n, of in enumerate(truth)]
    data = Labelled(texts, states, truth, np.arange(80) % 2 == 0)
    curves = {order: Simulation(data, 0, seed=0).curve(order) for order in ORDERS}
    assert all(figure > 0.99 for curve in curves.values() for figure in curve)
    assert max(Simulation(data, 1, seed=0).curve("random")) < 0.01  # every label is wrong
