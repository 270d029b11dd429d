"""Promises of a cascade: how often a proved one is broken, in corpora whose answers are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import softmax
from scipy.stats import binom, binomtest
from sklearn.linear_model import LogisticRegression

from pipeline.evaluation.promises import (
    LEVELS,
    Judged,
    Promise,
    proved_share,
    refuted_above,
    wrong_by_rule,
)
from pipeline.fitted.certificate import Thresholds

Floats = NDArray[np.float64]
DOCUMENTS, SAMPLE = 10_000, 1_000
AGREE = {"agree": 0.98, "confidence": 0.95, "threshold": 0.5}
OF_FIRST = {"recall": 0.9, "precision": 0.85, "confidence": 0.95, "threshold": 0.5}


class Answers(NamedTuple):
    """[docs, labels] what the cheap stage and the whole model answer about a corpus."""

    cheap: Floats
    whole: Floats

    def of(self, rows: NDArray[np.integer]) -> Answers:
        return Answers(self.cheap[rows], self.whole[rows])


def corpus(random: np.random.Generator, prevalence: float, labels: int) -> Answers:
    """The first label has this prevalence; the cheap stage is worse in one source of five."""
    weights = np.array([prevalence, *[(1 - prevalence) / (labels - 1)] * (labels - 1)])
    truth = random.choice(labels, DOCUMENTS, p=weights)
    noise = random.uniform(0.6, 2.5) * np.where(random.random(DOCUMENTS) < 0.2, 3, 1)
    logits = np.log(weights) + random.uniform(3, 8) * np.eye(labels)[truth]
    logits += noise[:, None] * random.normal(size=(DOCUMENTS, labels))
    return Answers(softmax(logits, axis=1), np.eye(labels)[truth])


def with_equal_texts(random: np.random.Generator, prevalence: float, labels: int) -> Answers:
    """Half of the documents are copies of 40 texts."""
    half = DOCUMENTS // 2
    rows = np.concatenate([np.arange(half), random.integers(0, 40, half)])
    return corpus(random, prevalence, labels).of(rows)


def proved_rule(own: Judged, first: Answers, second: Answers) -> Thresholds | None:
    """The cheapest rule of the first half that the second half proves."""
    rules = own.rules(own.curves(*first))
    number = own.proof(rules, second.cheap[None], second.whole).rule
    return rules[number] if number >= 0 else None


def is_kept(own: Judged, rule: Thresholds, answers: Answers) -> bool:
    """Whether the promise holds of the whole corpus."""
    [(decided, _)] = wrong_by_rule([rule], own, answers.cheap[None], answers.whole)
    cheap, truth = own.chosen(answers.cheap), own.chosen(answers.whole)
    decisions = np.where(decided[:, None], cheap, truth)
    right, positive, predicted = (decisions == truth)[:, 0], truth[:, 0] == 1, decisions[:, 0] == 1
    same = (np.abs(decisions - truth) <= own.steps).all(axis=1)
    shares = {"agree": same, "recall": right[positive], "precision": right[predicted]}
    promised = own.promise.shares.items()
    return all(not len(shares[name]) or shares[name].mean() >= share for name, share in promised)


def judged(labels: int, promised: Mapping[str, Any], kind: str = "choice") -> Judged:
    return Judged.of([f"l{n}" for n in range(labels)], kind, promised)


CASES = [
    (labels, promised, prevalence, make, kind)
    for labels, promised, kind in (
        (2, AGREE, "choice"),
        (10, AGREE, "choice"),
        (6, AGREE, "score"),
        (2, OF_FIRST, "choice"),
    )
    for prevalence in (0.5, 0.05, 0.005)
    for make in (corpus, with_equal_texts)
]


@pytest.mark.parametrize(
    ("labels", "promised", "prevalence", "make", "kind", "corpora"),
    [
        (2, AGREE, 0.5, with_equal_texts, "choice", 60),
        (10, AGREE, 0.005, corpus, "choice", 60),
        (6, AGREE, 0.05, corpus, "score", 60),
        (2, OF_FIRST, 0.5, corpus, "choice", 60),
        (2, OF_FIRST, 0.05, with_equal_texts, "choice", 60),
        *(pytest.param(*case, 2_000, marks=pytest.mark.slow) for case in CASES),
    ],
)
def test_a_proved_promise_is_broken_in_at_most_the_stated_share_of_corpora(
    labels: int,
    promised: Mapping[str, Any],
    prevalence: float,
    make: Callable[[np.random.Generator, float, int], Answers],
    kind: str,
    corpora: int,
) -> None:
    own, proved, broken = judged(labels, promised, kind), 0, 0
    for number in range(corpora):
        random = np.random.default_rng(number)
        answers = make(random, prevalence, labels)
        drawn = random.choice(DOCUMENTS, SAMPLE, replace=False)
        halves = answers.of(drawn[: SAMPLE // 2]), answers.of(drawn[SAMPLE // 2 :])
        if (rule := proved_rule(own, *halves)) is not None:
            proved, broken = proved + 1, broken + (not is_kept(own, rule, answers))
    # — of all corpora: one where nothing is proved breaks no promise. A run has two such tests
    assert binomtest(broken, corpora, 0.05 / 2, alternative="greater").pvalue > 1e-3
    assert proved > corpora / 2 or (promised is OF_FIRST and prevalence < 0.5)


@pytest.mark.parametrize("corpora", [60, pytest.param(2_000, marks=pytest.mark.slow)])
def test_rules_of_the_first_run_are_tested_again_with_the_documents_of_later_ones(
    corpora: int,
) -> None:
    """Each night brings documents about which the cheap stage is better or worse than before."""
    own, broken, kept = judged(2, AGREE), np.zeros(3, np.int64), 0
    for number in range(corpora):
        random = np.random.default_rng(number)
        nights = [corpus(random, 0.5, 2).of(np.arange(3_000)) for _ in broken]
        drawn, rules, rule = random.random(9_000), [], len(LEVELS)
        for night in range(len(nights)):
            answers = Answers(*map(np.concatenate, zip(*nights[: night + 1], strict=True)))
            half = (drawn[: len(answers.whole)] * 10).astype(int)
            first, second = (answers.of(np.flatnonzero(half == number)) for number in (0, 1))
            rules = rules or own.rules(own.curves(*first))
            proved = own.proof(rules, second.cheap[None], second.whole).rule
            kept += rule <= proved
            if (rule := min(rule, proved)) < 0:
                break
            broken[night] += not is_kept(own, rules[rule], answers)
    assert all(binomtest(of, corpora, 0.05, alternative="greater").pvalue > 1e-3 for of in broken)
    assert kept > corpora / 2  # of two nights each, on which the rule may stay


def fitted_in_second_half(random: np.random.Generator, *, leaks: bool) -> Answers:
    """Many random features, labels that do not follow from them, and a fit to the documents."""
    truth = random.random(DOCUMENTS) < 0.5
    states = random.normal(size=(DOCUMENTS, 60))
    fit = LogisticRegression(C=10).fit(states[:200], truth[:200])
    p = fit.predict_proba(states)
    rows = np.arange(DOCUMENTS) if leaks else np.arange(200, DOCUMENTS)
    return Answers(p[rows], np.eye(2)[truth[rows].astype(int)])


@pytest.mark.parametrize("leaks", [True, False])
def test_documents_that_the_readout_was_fitted_to_prove_a_false_promise(leaks: bool) -> None:
    """The planted fault of a sample whose second half has fitted documents."""
    own, broken = judged(2, {**AGREE, "agree": 0.8}), 0
    for number in range(20):
        random = np.random.default_rng(number)
        answers = fitted_in_second_half(random, leaks=leaks)
        rows = np.arange(200) if leaks else random.choice(len(answers.whole), 200, replace=False)
        rule = proved_rule(own, answers.of(rows[::2]), answers.of(rows[1::2]))
        broken += rule is not None and not is_kept(own, rule, answers)
    assert broken > 10 if leaks else broken <= 4


@given(st.integers(1, 2_000), st.floats(0.5, 0.999), st.data())
def test_a_proved_share_is_the_least_that_the_binomial_law_does_not_refute(
    trials: int, confidence: float, data: st.DataObject
) -> None:
    errors = data.draw(st.integers(0, trials))
    share = proved_share(errors, trials, confidence)
    if errors == trials:
        assert share == 0
    else:
        assert binom.cdf(errors, trials, 1 - share) == pytest.approx(1 - confidence, rel=1e-6)
    above = refuted_above(errors, trials, confidence)
    if errors == 0:
        assert above == 1
    else:
        assert binom.sf(errors - 1, trials, 1 - above) == pytest.approx(1 - confidence, rel=1e-6)


@given(st.floats(0.01, 0.999), st.floats(0.5, 0.999))
def test_the_trials_needed_prove_the_share_and_one_less_does_not(
    share: float, confidence: float
) -> None:
    needed = Promise({"agree": share}, confidence).trials_needed
    assert proved_share(0, needed, confidence) >= share * (1 - 1e-9)
    assert needed == 1 or proved_share(0, needed - 1, confidence) < share


def test_a_document_without_a_cheap_answer_is_decided_wrongly() -> None:
    own, answers = judged(2, AGREE), corpus(np.random.default_rng(0), 0.5, 2)
    rules = own.rules(own.curves(*answers))[::50]
    cheap = answers.cheap.copy()
    cheap[:100] = np.nan
    before = [*wrong_by_rule(rules, own, answers.cheap[None], answers.whole)]
    after = [*wrong_by_rule(rules, own, cheap[None], answers.whole)]
    for (decided, wrong), (now_decided, now_wrong) in zip(before, after, strict=True):
        assert now_decided[:100].all() and now_wrong[:100].all()
        np.testing.assert_array_equal(now_decided[100:], decided[100:])
        np.testing.assert_array_equal(now_wrong[100:], wrong[100:])


@pytest.mark.parametrize("promised", [AGREE, OF_FIRST])
def test_a_class_that_no_document_has_is_decided_last(promised: dict[str, Any]) -> None:
    own = judged(2, promised)
    first = np.tile([[0.9, 0.1]], (200, 1))
    rules = own.rules(own.curves(first, first))
    saturated = np.array([[0.0, 1.0]])
    assert not any(rule.decides(saturated, own.labels).any() for rule in rules[:-1])
