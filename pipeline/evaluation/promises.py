"""Rules for which documents a cheap answer decides, proved on a uniform sample of documents.

Entry point: `Judged` compares the answers of stages of a cascade, makes rules of one half of a
sample, and takes the cheapest rule whose promise the other half proves.

A document that the rule does not decide has the whole model's answer. The rules are fixed before
the other half is looked at. They are tested one after the other, the most careful one first, until
one is not proved. A broken promise is proved only if the test of the first rule that breaks it
fails, so each test may have the whole risk, and whichever of the proved rules is taken keeps its
promise: fixed-sequence testing, as of Angelopoulos et al., "Learn then Test" (2021), section 3.
Each test is the exact bound of Clopper and Pearson (1934).
A promise of recall and of precision, or of several groups, is broken if one part is, and proved
only if all are: an intersection-union test (Berger, 1982), so each part may have the whole risk.

Assumption: each half is drawn uniformly at random from the documents that the promise is about,
and no text of the first half influences the second, except through the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, logit
from scipy.stats import beta

from pipeline.fitted.certificate import Share, Thresholds

Bools = NDArray[np.bool_]
Floats = NDArray[np.floating]
Ints = NDArray[np.integer]
Groups = NDArray[np.str_]
# Of the rules, from careful to cheap: the logit of the least estimated probability of being right.
LEVELS = np.linspace(14, -6, 201)
_CLIP = 1e-6, 1 - 1e-6  # of probabilities whose logit is taken
_LEAST_SLOPE, _NEVER = 1e-3, -40.0  # of a class without documents: it is decided last


@dataclass(frozen=True, slots=True)
class Promise:
    """The shares that must hold for all documents, and the confidence."""

    # `agree`: of the documents, the share with the whole model's answer; or `recall`: of the
    # positive ones, the share that is called positive, and `precision`: of those the positive ones.
    shares: Mapping[str, float]
    confidence: float  # of a test: the probability that it proves no broken promise

    @classmethod
    def of(cls, promised: Mapping[str, Any]) -> Promise:
        """The promise as a spec has it. A run has two tests, each with half of the risk: that of
        the rules that the run before proved, and that of new ones.
        """
        names = ("agree", "recall", "precision")
        confidence = (1 + promised["confidence"]) / 2
        return cls({n: promised[n] for n in names if n in promised}, confidence)

    @property
    def trials_needed(self) -> int:
        """The fewest trials that prove each share, if none is an error.

        They are documents of the second half: for recall and precision positive ones.
        """
        return ceil(log(1 - self.confidence) / log(max(self.shares.values())))


@dataclass(frozen=True, slots=True)
class Proof:
    """The cheapest rule that is proved, by its index, and what it proves; without one -1, and what
    the most careful rule proves.
    """

    rule: int
    shares: Mapping[str, Share]  # by name; of groups, `NAME (GROUP)`
    decided: float  # the share of the documents that the rule decides; 0 without one


def proved_share(errors: int, trials: int, confidence: float) -> float:
    """The smallest share of successes that the counts do not refute (Clopper and Pearson)."""
    return 0.0 if errors >= trials else float(1 - beta.ppf(confidence, errors + 1, trials - errors))


def refuted_above(errors: int, trials: int, confidence: float) -> float:
    """The largest share of successes that the counts do not refute (Clopper and Pearson)."""
    return 1.0 if errors == 0 else float(1 - beta.ppf(1 - confidence, errors, trials - errors + 1))


def _shares(
    wrong: Bools, promise: Promise, positive: Bools | None, groups: Groups | None
) -> Iterator[tuple[str, Share]]:
    """The test of each share that is promised, by its name."""
    if groups is not None:
        for group in np.unique(groups):
            own = groups == group
            of_own = _shares(wrong[own], promise, None if positive is None else positive[own], None)
            yield from ((f"{name} ({group})", share) for name, share in of_own)
        return
    trials, errors = {"agree": len(wrong)}, {"agree": int(wrong.sum())}
    if positive is not None:
        missed, false = int((wrong & positive).sum()), int((wrong & ~positive).sum())
        of_all = int(positive.sum())
        trials |= {"recall": of_all, "precision": of_all - missed + false}
        errors |= {"recall": missed, "precision": false}
    for name, promised in promise.shares.items():
        proved = proved_share(errors[name], trials[name], promise.confidence)
        yield name, Share(promised, trials[name], errors[name], proved)


@dataclass(frozen=True, slots=True)
class Judged:
    """The part of an answer that is promised: the likeliest label, or whether labels apply."""

    promise: Promise
    labels: tuple[str, ...]
    each: tuple[int, ...] = ()  # labels that apply or not, each for itself; (): the likeliest one
    threshold: float = 0.5  # the probability from which one of these applies
    steps: int = 0  # two labels that are at most this far apart count as the same

    @classmethod
    def of(cls, labels: Sequence[str], kind: str, promised: Mapping[str, Any]) -> Judged:
        """Of a task of this kind, with the promise as its spec has it."""
        promise = Promise.of(promised)
        if "agree" not in promise.shares:
            own = list(labels).index(promised.get("label", labels[0]))
            return cls(promise, tuple(labels), (own,), promised["threshold"])
        each = tuple(range(len(labels))) if kind == "multi" else ()
        return cls(promise, tuple(labels), each, steps=int(kind == "score"))

    def chosen(self, p: Floats) -> Ints:  # [docs, labels] -> [docs, parts]
        """The likeliest label, or whether each label applies."""
        if not self.each:
            return np.asarray(p.argmax(axis=1)[:, None], np.int64)
        return np.asarray(p[:, self.each] >= self.threshold, np.int64)

    def of_chosen(self, p: Floats) -> Floats:  # [docs, labels] -> [docs, parts]
        """The probability of what is chosen."""
        if not self.each:
            return np.asarray(p.max(axis=1)[:, None])
        own = p[:, self.each]
        return np.where(own >= self.threshold, own, 1 - own)

    def right(self, p: Floats, whole: Floats) -> Bools:  # [docs, labels] each -> [docs, parts]
        """Whether an answer is that of the whole model."""
        return np.asarray(np.abs(self.chosen(p) - self.chosen(whole)) <= self.steps, np.bool_)

    def positive(self, whole: Floats) -> Bools | None:  # [docs]
        """Which documents are positive, where recall or precision is promised."""
        return None if "agree" in self.promise.shares else self.chosen(whole)[:, 0].astype(np.bool_)

    def curves(
        self,
        p: Floats,  # [docs, labels]
        whole: Floats,  # [docs, labels]
    ) -> Floats:  # [parts, classes, 2]: slope and offset
        """The estimated probability that an answer is right, by its own probability.

        For each part and class: a logistic regression on the logit of p, with Platt's prior (1999)
        for classes without an error.
        """
        x, right = logit(np.clip(self.of_chosen(p), *_CLIP)), self.right(p, whole)
        classes = np.arange(2 if self.each else len(self.labels))
        of_class = self.chosen(p)[..., None] == classes  # [docs, parts, classes]
        of_parts = zip(x.T, right.T, of_class.swapaxes(0, 1), strict=True)
        return np.array([[_platt(z[own], y[own]) for own in of.T] for z, y, of in of_parts])

    def rules(self, curves: Floats) -> list[Thresholds]:
        """Thresholds from careful to cheap: the probability of each class from which it is decided.

        A rule decides a document whose parts are all estimated to be right with the probability of
        its level, or a higher one. So each rule decides all that the one before decides. 2: none.
        """
        at = expit((LEVELS[:, None, None] - curves[..., 1]) / curves[..., 0])
        # — probabilities are stored as float32
        return [self._thresholds(rule) for rule in np.where(at.astype(np.float32) < 1, at, 2.0)]

    def _thresholds(self, rule: Floats) -> Thresholds:  # [parts, classes]
        if not self.each:
            at = {
                label: (-1.0, float(own)) for label, own in zip(self.labels, rule[0], strict=True)
            }
            return Thresholds(at, each=False)
        below = float(np.nextafter(np.float32(self.threshold), np.float32(0)))
        return Thresholds(
            {
                self.labels[column]: (min(1 - float(no), below), max(float(yes), self.threshold))
                for column, (no, yes) in zip(self.each, rule, strict=True)
            },
            each=True,
        )

    def proof(
        self,
        rules: Iterable[Thresholds],  # from careful to cheap
        p: Floats,  # [stages, docs, labels]: of the stages before the last; NaN without an answer
        whole: Floats,  # [docs, labels]
        groups: Groups | None = None,  # [docs]: the promise is about each group; None: about all
    ) -> Proof:
        """The cheapest rule whose promise these documents prove."""
        proof: Proof | None = None
        positive = self.positive(whole)
        for number, (decided, wrong) in enumerate(wrong_by_rule(rules, self, p, whole)):
            shares = dict(_shares(wrong, self.promise, positive, groups))
            if any(share.proved < share.promised for share in shares.values()):
                return proof or Proof(-1, shares, 0.0)
            proof = Proof(number, shares, float(decided.mean()))
        assert proof is not None, "no rules"
        return proof

    def not_refuted(self, rules: Sequence[Thresholds], p: Floats, whole: Floats) -> int:
        """How many of the rules, from the first on, break no promise by these documents.

        A promise is broken if the counts refute its share. The arguments are those of `proof`.
        """
        positive, confidence = self.positive(whole), self.promise.confidence
        for number, (_, wrong) in enumerate(wrong_by_rule(rules, self, p, whole)):
            shares = (share for _, share in _shares(wrong, self.promise, positive, None))
            if any(refuted_above(s.errors, s.trials, confidence) < s.promised for s in shares):
                return number
        return len(rules)


def _platt(x: Floats, right: Bools) -> tuple[float, float]:
    """The slope and the offset of a logistic regression with Platt's targets; it rises."""
    successes, failures = right.sum(), (~right).sum()
    targets = np.where(right, (successes + 1) / (successes + 2), 1 / (failures + 2))

    def loss(at: Floats) -> tuple[float, Floats]:
        z = at[0] * x + at[1]
        error = expit(z) - targets
        gradient = np.array([(error * x).sum(), error.sum()])
        return float((np.logaddexp(0, z) - targets * z).sum()), gradient

    if not len(x):
        return _LEAST_SLOPE, _NEVER
    bounds = [(_LEAST_SLOPE, None), (None, None)]
    slope, offset = minimize(loss, np.array([1.0, 0.0]), jac=True, bounds=bounds).x
    return float(slope), float(offset)


def wrong_by_rule(
    rules: Iterable[Thresholds],
    judged: Judged,
    p: Floats,  # as of `Judged.proof`
    whole: Floats,  # [docs, labels]
) -> Iterator[tuple[Bools, Bools]]:  # of each rule: [docs], [docs]
    """Which documents a stage before the last decides, and which of them it decides wrongly.

    A document on which a stage fails counts as decided, wrongly: no later stage is asked about it.
    """
    failed = np.isnan(p).any(axis=2)
    right = np.stack([judged.right(of_stage, whole).all(axis=1) for of_stage in p]) & ~failed
    for rule in rules:
        sure = np.stack([rule.decides(of_stage, judged.labels) for of_stage in p]) | failed
        first, decided = sure.argmax(axis=0), np.asarray(sure.any(axis=0), np.bool_)
        yield decided, decided & ~right[first, np.arange(len(whole))]
