"""How far the labels of two people agree. Entry point: `agreements`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from pipeline.gold.people import GoldLine, Label
from pipeline.spec.tasks import TaskSpec


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two people's labels of the documents that both labelled."""

    people: tuple[str, str]
    documents: int
    alike: int  # documents with the same label, or the same set of labels
    kappa: float | None  # None: undefined, as where both gave one label to all


def agreements(lines: Iterable[GoldLine], task: TaskSpec) -> list[Agreement]:
    """The agreement of each two people with a document in common; `lines` are current answers."""
    people: dict[str, dict[str, Label]] = {}
    for line in lines:
        if line.label is not None:
            people.setdefault(line.by, {})[line.content_hash] = line.label
    pairs = []
    for first, second in combinations(sorted(people), 2):
        if common := sorted(people[first].keys() & people[second].keys()):
            one, other = ([people[name][each] for each in common] for name in (first, second))
            alike = sum(a == b for a, b in zip(one, other, strict=True))
            pairs.append(Agreement((first, second), len(common), alike, _kappa(one, other, task)))
    return pairs


def _kappa(one: list[Label], other: list[Label], task: TaskSpec) -> float | None:
    """Cohen's kappa; of `multi` its mean over the labels, of `score` with quadratic weights."""
    from sklearn.metrics import cohen_kappa_score  # — the first document does not wait for it

    names = list(task.labels)
    if task.kind == "multi":
        pairs = [
            tuple([int(name in label) for label in labels] for labels in (one, other))
            for name in names
        ]
    else:
        pairs = [tuple([names.index(str(label)) for label in labels] for labels in (one, other))]
    weights = "quadratic" if task.kind == "score" else None
    # — where both people gave one label to all, chance alone makes them agree
    values = [cohen_kappa_score(*p, weights=weights) for p in pairs if len({*p[0], *p[1]}) > 1]
    return float(np.mean(values)) if values else None
