"""Readouts find a signal, and a held-out row has no influence on its own score."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from pipeline.evaluation.metrics import score
from pipeline.evaluation.readout_fitting import (
    STRENGTHS,
    Choice,
    GoldStates,
    cheapest,
    choose,
    fit,
    fit_logits,
    fit_path,
    row_weights,
)
from pipeline.evaluation.resampling import folds

HIDDEN = 24

SOURCE = np.random.default_rng(0)
TRUTH = (SOURCE.random(500) < 0.2).astype(np.int64)
GROUPS = np.arange(500)
GROUPS[100:110] = 7  # one text, eleven times
TRUTH[100:110] = TRUTH[7]


def gold(
    rows: int = 240,
    *,
    signal: tuple[float, ...] = (0.0, 1.5, 0.5),
    rare: float = 0.5,
    seed: int = 0,
) -> GoldStates:
    """States of one layer for each signal, the second pooling weaker than the first."""
    source = np.random.default_rng(0)
    truth = (source.random(rows) < rare).astype(np.int64)
    states = source.normal(size=(rows, len(signal), 2, HIDDEN)) * 3 + 1
    for layer, strength in enumerate(signal):
        for pooling, share in enumerate((1.0, 0.5)):
            states[:, layer, pooling, :4] += 3 * share * strength * (2 * truth[:, None] - 1) / 2
    return GoldStates(states.astype(np.float32), np.eye(2)[truth], np.arange(rows))


def auroc(truth: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    value = score(truth, p, ["a", "b"], resamples=1).headlines["auroc"].value
    assert value is not None
    return value


def of_first_place(gold: GoldStates) -> GoldStates:
    """The states of one layer and pooling."""
    return GoldStates(gold.states[:, :1, :1], gold.targets, gold.groups)


def test_the_lowest_layer_and_the_pooling_with_the_strongest_signal_are_chosen() -> None:
    rows = gold(signal=(0.0, 1.5, 1.5))
    fitted = fit(rows)
    assert (fitted.layer, fitted.pooling) == (1, 0)
    assert len(fitted.maps) == 3 and fitted.by_layer.shape == (3, 240, 2)
    assert auroc(rows.truth, fitted.held_out) > 0.9 > auroc(rows.truth, fitted.by_layer[0])


def choice(loss: float, standard_error: float) -> Choice:
    return Choice(loss, standard_error, 0.1, 1.0, np.zeros(2), np.zeros((0, 2)))


@pytest.mark.parametrize(
    ("by_layer", "chosen"),
    [
        # — by layer, by pooling: loss and standard error
        ([[(0.32, 0.5), (0.31, 0.5)], [(0.3, 0.02), (0.9, 0.5)]], (0, 1)),
        ([[(0.33, 0.5), (0.34, 0.5)], [(0.3, 0.02), (0.9, 0.5)]], (1, 0)),  # the best's own error
        ([[(0.5, 0.01)], [(0.31, 0.01)], [(0.305, 0.01)], [(0.3, 0.01)]], (1, 0)),
        ([[(0.3, 0.01)], [(0.3, 0.01)]], (0, 0)),
    ],
)
def test_the_lowest_layer_within_one_standard_error_is_chosen(
    by_layer: list[list[tuple[float, float]]], chosen: tuple[int, int]
) -> None:
    choices = [[choice(*figures) for figures in of_layer] for of_layer in by_layer]
    assert cheapest(choices) == chosen


def test_the_standard_error_is_that_of_the_mean_loss_of_the_rows() -> None:
    rows = of_first_place(gold(signal=(1.0,)))
    [[chosen]] = choose(rows, [0.1])
    logits = np.empty((240, 2))
    for split in folds(rows.truth, rows.groups, number=3, seed=20_27):
        scaler = StandardScaler().fit(rows.states[split.fitted, 0, 0].astype(np.float64))
        # — as many rows as are fitted weaken the penalty
        oracle = LogisticRegression(C=0.1 * 240 / len(split.fitted), tol=1e-8, max_iter=5_000)
        oracle.fit(scaler.transform(rows.states[split.fitted, 0, 0]), rows.truth[split.fitted])
        margin = oracle.decision_function(scaler.transform(rows.states[split.held_out, 0, 0]))
        logits[split.held_out] = margin[:, None] * [-0.5, 0.5]
    p = softmax(chosen.scale * logits + chosen.offset, axis=1)
    split_loss = -np.log(p[np.arange(240), rows.truth])
    assert chosen.loss == pytest.approx(split_loss.mean(), rel=1e-3)
    assert chosen.standard_error == pytest.approx(split_loss.std(ddof=1) / np.sqrt(240), rel=1e-3)


def test_random_labels_are_not_learnt() -> None:
    """With a choice of 12 places and more dimensions than rows, in-sample AUROC would be 1."""
    source = np.random.default_rng(4)
    truth = np.arange(120) % 2
    states = source.normal(size=(120, 6, 2, 200)).astype(np.float32)
    fitted = fit(GoldStates(states, np.eye(2)[truth], np.arange(120)))
    assert abs(auroc(truth, fitted.held_out) - 0.5) < 0.12
    best = fitted.maps[fitted.layer]
    in_sample = softmax(best.logits(states[:, fitted.layer, fitted.pooling]), axis=1)
    assert auroc(truth, in_sample) > 0.9


def test_a_repeated_text_does_not_leak_its_label() -> None:
    """Each text occurs four times with one random label, which other folds would reveal."""
    source = np.random.default_rng(5)
    truth = np.repeat(np.arange(40) % 2, 4)
    states = np.repeat(source.normal(size=(40, 1, 1, 100)), 4, axis=0).astype(np.float32)
    leaking = fit(GoldStates(states, np.eye(2)[truth], np.arange(160)))
    honest = fit(GoldStates(states, np.eye(2)[truth], np.repeat(np.arange(40), 4)))
    assert auroc(truth, leaking.held_out) > 0.95
    assert abs(auroc(truth, honest.held_out) - 0.5) < 0.25


def test_the_held_out_probabilities_are_those_of_a_fit_without_the_fold() -> None:
    """The same procedure by scikit-learn, at one layer and pooling and one strength."""
    rows = of_first_place(gold(signal=(1.0,)))
    fitted = fit(rows, strengths=[0.1])
    states, truth = rows.states[:, 0, 0].astype(np.float64), rows.truth
    expected = np.empty((len(truth), 2))
    for split in folds(truth, rows.groups, number=5, seed=20_26):
        scaler = StandardScaler().fit(states[split.fitted])
        oracle = LogisticRegression(C=0.1, tol=1e-8, max_iter=5_000)
        oracle.fit(scaler.transform(states[split.fitted]), truth[split.fitted])
        margin = oracle.decision_function(scaler.transform(states[split.held_out]))
        expected[split.held_out] = margin[:, None] * [-0.5, 0.5]
    log_p = np.log(fitted.held_out)
    ratio = (log_p[:, 1] - log_p[:, 0]) / (expected[:, 1] - expected[:, 0])
    for split in folds(truth, rows.groups, number=5, seed=20_26):  # one temperature a fold
        np.testing.assert_allclose(
            ratio[split.held_out], np.median(ratio[split.held_out]), rtol=2e-3
        )


def test_probabilities_are_calibrated_also_where_a_rare_label_is_weighted() -> None:
    rows = of_first_place(gold(3_000, signal=(1.0,), rare=0.1))
    fitted = fit(rows, strengths=STRENGTHS)
    assert fitted.balanced and not gold(rare=0.4).balanced
    p, is_second = fitted.held_out[:, 1], rows.truth == 1
    groups = np.array_split(np.argsort(p), 15)
    assert np.mean([abs(p[own].mean() - is_second[own].mean()) for own in groups]) < 0.04
    assert fitted.held_out[:, 1].mean() == pytest.approx(rows.truth.mean(), abs=0.01)


def test_a_teachers_probabilities_are_learnt() -> None:
    source = np.random.default_rng(6)
    states = source.normal(size=(2_000, 1, 1, 5)).astype(np.float32)
    targets = softmax(states[:, 0, 0, :3].astype(np.float64), axis=1)
    fitted = fit(GoldStates(states, targets, np.arange(2_000)), strengths=[1.0])
    assert np.abs(fitted.held_out - targets).max() < 0.05


def test_every_row_is_held_out_once_with_its_group_and_labels_are_spread_evenly() -> None:
    splits, again, other = (folds(TRUTH, GROUPS, number=5, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(splits[0].held_out, again[0].held_out)
    assert not np.array_equal(splits[0].held_out, other[0].held_out)
    assert sorted(np.concatenate([s.held_out for s in splits])) == list(range(500))
    for split in splits:
        assert sorted([*split.fitted, *split.held_out]) == list(range(500))
        assert not set(GROUPS[split.fitted]) & set(GROUPS[split.held_out])
    rare = [TRUTH[split.held_out].sum() for split in splits]
    assert max(rare) - min(rare) <= 11, rare  # the group of eleven may be rare


def problem(
    rows: int, hidden: int, labels: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float64]]:
    """States of very different scales, indices of labels, and the same as targets."""
    source = np.random.default_rng(rows + labels)
    states = source.normal(size=(rows, hidden)) * np.geomspace(0.1, 1_000, hidden) + 7
    noisy = (states - 7) / np.geomspace(0.1, 1_000, hidden) @ source.normal(size=(hidden, labels))
    truth = (noisy + source.normal(size=noisy.shape) * 2).argmax(axis=1)
    states[:, 0] = 3.0  # constant, with no deviation to divide by
    return states.astype(np.float32), truth, np.eye(labels)[truth]


@pytest.mark.parametrize("labels", [2, 4])
@pytest.mark.parametrize("rows, hidden", [(200, 20), (30, 60)])
@pytest.mark.parametrize("balanced", [False, True])
def test_probabilities_are_those_of_scikit_learn(
    labels: int, rows: int, hidden: int, balanced: bool
) -> None:
    states, truth, targets = problem(rows, hidden, labels)
    weights = row_weights(targets, balanced)
    strengths = (0.01, 0.1, 1.0)
    for strength, fitted in zip(
        strengths, fit_path(states, targets, weights, strengths=strengths), strict=True
    ):
        oracle = LogisticRegression(
            C=strength, tol=1e-8, max_iter=10_000, class_weight="balanced" if balanced else None
        )
        x = StandardScaler().fit_transform(states.astype(np.float64))
        expected = oracle.fit(x, truth).predict_proba(x)
        np.testing.assert_allclose(softmax(fitted.logits(states), axis=1), expected, atol=2e-4)


@pytest.mark.parametrize("present", [[0, 2], [1], [3, 0, 1]])
def test_labels_without_a_row_get_almost_no_probability(present: list[int]) -> None:
    states, truth, _ = problem(90, 12, len(present) + 1)
    targets = np.eye(4)[np.array(present)[truth % len(present)]]
    for fitted in fit_path(states, targets, np.ones(90), strengths=[0.01, 0.1]):
        p = softmax(fitted.logits(states), axis=1)
        assert np.isfinite(p).all() and p[:, present].sum(axis=1).min() > 0.99
        np.testing.assert_allclose(p.mean(axis=0), targets.mean(axis=0), atol=5e-3)


def test_soft_targets_equal_a_weighted_row_for_each_label() -> None:
    states, _, _ = problem(80, 10, 3)
    targets = np.random.default_rng(0).dirichlet([0.5, 1, 1], 80)
    [fitted] = fit_path(states, targets, np.ones(80), strengths=[0.1])
    x = StandardScaler().fit_transform(states.astype(np.float64))
    oracle = LogisticRegression(C=0.1, tol=1e-8, max_iter=10_000)
    oracle.fit(np.repeat(x, 3, axis=0), np.tile([0, 1, 2], 80), targets.ravel())
    np.testing.assert_allclose(
        softmax(fitted.logits(states), axis=1), oracle.predict_proba(x), atol=2e-4
    )


def test_the_weights_of_a_rare_label_add_up_to_those_of_a_common_one() -> None:
    targets = np.eye(3)[[0] * 9 + [1]]  # the third label is in no row
    weights = row_weights(targets, True)
    assert weights[:9].sum() == pytest.approx(weights[9:].sum()) == pytest.approx(5)


def test_a_fit_restores_the_scale_and_the_offset_that_were_taken_away() -> None:
    source = np.random.default_rng(1)
    logits = source.normal(size=(20_000, 3)) * 2
    p = softmax(logits, axis=1)
    truth = (p.cumsum(axis=1) > source.random((20_000, 1))).argmax(axis=1)
    targets = np.eye(3)[truth]
    shift = np.array([0.5, 0.0, -0.5])
    scale, offset = fit_logits((logits - shift) / 4, targets, offsets=True)
    assert scale == pytest.approx(4, rel=0.05)
    np.testing.assert_allclose(offset - offset[1], shift, atol=0.08)
    scale, offset = fit_logits(logits * 4, targets, offsets=False)
    assert scale == pytest.approx(0.25, rel=0.05) and not offset.any()


def test_the_scale_of_separated_rows_is_bounded() -> None:
    targets = np.eye(2)[[0, 1] * 10]
    scale, _ = fit_logits(targets * 9, targets, offsets=True)
    assert scale <= np.exp(3.001)
