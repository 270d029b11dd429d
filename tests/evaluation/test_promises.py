"""Promises of a cascade: how often a proved one is broken, in corpora whose answers are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

from pipeline.evaluation.promises import (
    Promise,
    careful_to_cheap,
    decided_from,
    prove,
)

Floats, Ints = NDArray[np.floating], NDArray[np.integer]
CORPORA = 300


@dataclass(frozen=True)
class Answers:
    """Of each document of a corpus: the whole model's label, and the cheap answer."""

    truth: Ints
    p: Floats  # of the chosen label
    chosen: Ints

    def of(self, rows: Ints) -> Answers:
        return Answers(self.truth[rows], self.p[rows], self.chosen[rows])


def corpus(
    random: np.random.Generator, *, prevalence: float, labels: int, documents: int
) -> Answers:
    """The first label has this prevalence; cheap logits have noise, more of it in one source."""
    weights = [prevalence, *[(1 - prevalence) / (labels - 1)] * (labels - 1)]
    truth = random.choice(labels, documents, p=weights)
    noise = random.uniform(0.6, 2.5) * np.where(random.random(documents) < 0.2, 3, 1)
    logits = np.log(weights) + random.uniform(3, 8) * np.eye(labels)[truth]
    logits += noise[:, None] * random.normal(size=(documents, labels))
    log_p = log_softmax(logits, axis=1)
    return Answers(truth, np.exp(log_p.max(axis=1)), log_p.argmax(axis=1))


def repeated(random: np.random.Generator, answers: Answers) -> Answers:
    """The corpus with equal texts: a few make up half of it."""
    rows = np.concatenate(
        [np.arange(len(answers.p) // 2), random.integers(0, 40, len(answers.p) // 2)]
    )
    return answers.of(rows)


def is_kept(answers: Answers, decided: NDArray[np.bool_], promise: Promise) -> bool:
    """Whether the promise holds of the whole corpus."""
    called = np.where(decided, answers.chosen, answers.truth)
    agreed, positive = called == answers.truth, answers.truth == 0
    shares = {
        "agree": agreed.mean(),
        "recall": agreed[positive].mean() if positive.any() else 1.0,
        "precision": agreed[called == 0].mean() if (called == 0).any() else 1.0,
    }
    return all(shares[name] >= share for name, share in promise.shares.items())


def outcomes(
    promise: Promise, make: Callable[[np.random.Generator], Answers], *, sample: int, seed: int
) -> tuple[int, int, float]:
    """Of all corpora: the proved rules, the broken promises among them, the decided share."""
    proved, broken, share = 0, 0, 0.0
    for number in range(CORPORA):
        random = np.random.default_rng([seed, number])
        answers = make(random)
        drawn = random.choice(len(answers.p), sample, replace=False)
        fit, test = answers.of(drawn[: sample // 2]), answers.of(drawn[sample // 2 :])
        labels = int(answers.truth.max()) + 1
        rules = careful_to_cheap(fit.p, fit.chosen, fit.chosen == fit.truth, labels)
        of_test = decided_from(rules, test.p, test.chosen)
        positive = test.truth == 0
        proof = prove(of_test, test.chosen == test.truth, promise, positive)
        if proof.rule < 0:
            continue
        decided = decided_from(rules, answers.p, answers.chosen) <= proof.rule
        proved, share = proved + 1, share + decided.mean()
        broken += not is_kept(answers, decided, promise)
    return proved, broken, share / max(proved, 1)
