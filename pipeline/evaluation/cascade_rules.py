"""How the answers of two stages of a cascade are compared, and what a rule decides.

Entry points: `Judged`, for the answers of one task, and `wrong_by_rule`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.evaluation.promises import Bools, Floats, Ints, Promise, careful_to_cheap, fit_curves
from pipeline.fitted.certificate import Thresholds


@dataclass(frozen=True, slots=True)
class Judged:
    """What of a task's answers is promised: its likeliest label, or whether labels apply."""

    promise: Promise
    labels: tuple[str, ...]
    each: tuple[int, ...] = ()  # labels that apply or not, each for itself; (): the likeliest one
    threshold: float = 0.5  # the probability from which one of these applies
    steps: int = 0  # so far apart, two labels count as the same

    @classmethod
    def of(cls, labels: Sequence[str], kind: str, promised: Mapping[str, Any]) -> Judged:
        """Of a task of this kind, with the promise as its spec has it."""
        names = ("agree", "recall", "precision", "confidence")
        promise = Promise(**{name: promised[name] for name in names if name in promised})
        own: tuple[int, ...] = ()
        if promise.agree is None:
            own = (list(labels).index(promised.get("label", labels[0])),)
        elif kind == "multi":
            own = tuple(range(len(labels)))
        threshold = promised["threshold"] if promise.agree is None else 0.5
        return cls(promise, tuple(labels), own, threshold, int(kind == "score" and not own))

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
        return None if self.promise.agree is not None else self.chosen(whole)[:, 0].astype(np.bool_)

    def curves(self, p: Floats, whole: Floats) -> Floats:  # [docs, labels] each
        """How right the answers are by their probability; see `fit_curves`."""
        classes = 2 if self.each else len(self.labels)
        return fit_curves(self.of_chosen(p), self.chosen(p), self.right(p, whole), classes)

    def rules(self, curves: Floats) -> list[Thresholds]:
        """Thresholds from careful to cheap."""
        return [self._thresholds(rule) for rule in careful_to_cheap(curves)]

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


def wrong_by_rule(
    rules: Sequence[Thresholds],
    judged: Judged,
    p: Floats,  # [stages, docs, labels]: of the stages before the last; NaN without an answer
    whole: Floats,  # [docs, labels]
) -> Iterator[tuple[Bools, Bools]]:  # of each rule: [docs], [docs]
    """Which documents a stage before the last decides, and which of them it decides wrongly.

    A document on which a stage fails is one of both: no later stage is asked about it.
    """
    failed = np.isnan(p).any(axis=2)
    right = np.stack([judged.right(of_stage, whole).all(axis=1) for of_stage in p]) & ~failed
    for rule in rules:
        sure = np.stack([rule.decides(of_stage, judged.labels) for of_stage in p]) | failed
        first, decided = sure.argmax(axis=0), np.asarray(sure.any(axis=0), np.bool_)
        yield decided, decided & ~right[first, np.arange(len(whole))]
