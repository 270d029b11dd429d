"""What a cheap answer may decide, with a promise that a uniform sample of documents proves.

Entry points: `careful_to_cheap` makes rules from one half of a sample, and `prove` takes the
cheapest rule whose promise the other half proves.

A document that the rule does not decide has the whole model's answer. The rules are fixed before
the other half is looked at. They are tested one after the other, the most careful one first, until
one is not proved. A broken promise is proved only if the test of the first rule that breaks it
fails, so each test may have the whole risk: fixed-sequence testing, as of Angelopoulos et al.,
"Learn then Test" (2021), section 3. Each test is the exact bound of Clopper and Pearson (1934).
A promise of recall and of precision is broken if one of the two is, and proved only if both are:
an intersection-union test (Berger, 1982), so each of the two may have the whole risk, too.

Assumption: each half is drawn uniformly at random from the documents that the promise is about,
and no text of the first half influences the second but through the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, log

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, logit
from scipy.stats import beta

Bools = NDArray[np.bool_]
Floats = NDArray[np.floating]
Ints = NDArray[np.integer]
RULES = 100  # of a path: each decides a hundredth of the first half more


@dataclass(frozen=True, slots=True)
class Promise:
    """What shall hold of all documents, with which confidence. One share at least is stated."""

    agree: float | None = None  # of the documents, the share with the whole model's answer
    recall: float | None = None  # of the positive ones, the share that is called positive
    precision: float | None = None  # of those that are called positive, the share that is
    confidence: float = 0.95  # the probability, over samples, that no broken promise is proved

    @property
    def shares(self) -> Mapping[str, float]:
        """The shares that are promised, by name."""
        of_all = {"agree": self.agree, "recall": self.recall, "precision": self.precision}
        return {name: share for name, share in of_all.items() if share is not None}

    def trials_needed(self, share: str) -> int:
        """The fewest trials that prove a share, if none is an error.

        They are documents of the second half: for recall and precision positive ones.
        """
        return ceil(log(1 - self.confidence) / log(self.shares[share]))


@dataclass(frozen=True, slots=True)
class Test:
    """How many trials of a share were errors, and the share that they prove."""

    trials: int
    errors: int
    proved: float


@dataclass(frozen=True, slots=True)
class Proof:
    """The cheapest rule that is proved, by its index, and its tests; without one -1, and those of
    the most careful rule.
    """

    rule: int
    tests: Mapping[str, Test]  # by share


def proved_share(errors: int, trials: int, confidence: float) -> float:
    """The smallest share of successes that the counts do not refute (Clopper and Pearson)."""
    return float(1 - beta.ppf(confidence, errors + 1, trials - errors)) if errors < trials else 0.0


def careful_to_cheap(
    p: Floats,  # [docs]: the probability of the class that the cheap answer chooses
    chosen: Ints,  # [docs]: this class
    right: Bools,  # [docs]: whether it is the whole model's
    classes: int,
) -> Floats:  # [RULES, classes]: each class is decided at this probability, or above
    """Rules of which each decides all that the one before decides, and a hundredth more.

    Documents come in the order of the estimated probability that the cheap answer is right: for
    each class a logistic regression on the logit of p, with Platt's prior (1999) for classes
    without an error.
    """
    x = logit(np.clip(p, 1e-6, 1 - 1e-6))
    sure = np.empty(len(p))
    fitted = [_platt(x[chosen == of], right[chosen == of]) for of in range(classes)]
    for of, (slope, offset) in enumerate(fitted):
        sure[chosen == of] = expit(slope * x[chosen == of] + offset)
    levels = np.quantile(sure, 1 - np.arange(1, RULES + 1) / RULES, method="higher")
    rules = np.full((RULES, classes), np.inf)
    for of in range(classes):
        order = np.argsort(-sure[chosen == of], kind="stable")
        own, probabilities = sure[chosen == of][order], p[chosen == of][order]
        counts = np.searchsorted(-own, -levels, side="right")
        rules[counts > 0, of] = np.minimum.accumulate(probabilities)[counts[counts > 0] - 1]
    return rules


def _platt(x: Floats, right: Bools) -> tuple[float, float]:
    """The slope, at least 0, and the offset of a logistic regression with Platt's targets."""
    if not len(x):
        return 0.0, 0.0
    targets = np.where(
        right, (right.sum() + 1) / (right.sum() + 2), 1 / ((~right).sum() + 2)
    )

    def loss(at: Floats) -> tuple[float, Floats]:
        z = at[0] * x + at[1]
        error = expit(z) - targets
        return float((np.logaddexp(0, z) - targets * z).mean()), np.array(
            [(error * x).mean(), error.mean()]
        )

    start = np.array([1.0, 0.0])
    slope, offset = minimize(loss, start, jac=True, bounds=[(1e-3, None), (None, None)]).x
    return float(slope), float(offset)


def decided_from(rules: Floats, p: Floats, chosen: Ints) -> Ints:  # [docs]
    """The first rule that decides each document; the number of rules for one that none decides."""
    return np.asarray((p[None, :] < rules[:, chosen]).sum(axis=0), np.int64)


def prove(
    decided: Ints,  # [docs]: `decided_from` of the second half
    right: Bools,  # [docs]: whether the cheap answer is the whole model's
    promise: Promise,
    positive: Bools | None = None,  # [docs]: by the whole model; for recall and precision
) -> Proof:
    """The cheapest rule whose promise these documents prove."""
    proof: Proof | None = None
    for rule in range(RULES):
        wrong = (decided <= rule) & ~right
        tests = dict(_tests(wrong, promise, positive))
        if any(test.proved < promise.shares[name] for name, test in tests.items()):
            return proof or Proof(-1, tests)
        proof = Proof(rule, tests)
    assert proof is not None
    return proof


def _tests(
    wrong: Bools, promise: Promise, positive: Bools | None
) -> Iterator[tuple[str, Test]]:
    """The test of each share that is promised, by its name."""
    trials, errors = {"agree": len(wrong)}, {"agree": int(wrong.sum())}
    if positive is not None:
        missed, false = int((wrong & positive).sum()), int((wrong & ~positive).sum())
        trials |= {"recall": int(positive.sum())}
        trials["precision"] = trials["recall"] - missed + false
        errors |= {"recall": missed, "precision": false}
    for name in promise.shares:
        proved = proved_share(errors[name], trials[name], promise.confidence)
        yield name, Test(trials[name], errors[name], proved)
