"""How far the labels of two people agree. Entry point: `agreements`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from pipeline.evaluation.metrics import Ints, mean_defined
from pipeline.evaluation.ordinal import kappas
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
            both = [
                [one_hot(people[name][each], task) for name in (first, second)] for each in common
            ]
            alike = sum(one == other for one, other in both)
            value = _task_kappa(np.array(both, np.int64), task)
            pairs.append(Agreement((first, second), len(both), alike, value))
    return pairs


def _task_kappa(codes: Ints, task: TaskSpec) -> float | None:  # [documents, 2, labels]
    """Kappa; of `multi` its mean over the labels, of `score` with quadratic weights."""
    if task.kind == "multi":
        by_label = [kappa(of[:, 0], of[:, 1], 2) for of in np.moveaxis(codes, 2, 0)]
        value = float(mean_defined(np.array(by_label)))
    elif task.kind == "score":
        one, other = np.array(task.values)[codes.argmax(axis=2)].T
        value = float(kappas(one, other, np.ones((1, len(codes))))[0])
    else:
        one, other = codes.argmax(axis=2).T
        value = kappa(one, other, len(task.labels))
    return None if np.isnan(value) else value


def one_hot(label: Label, task: TaskSpec) -> list[int]:  # [labels]
    """1 for the label, or for each of several."""
    chosen = {label} if isinstance(label, str) else {*label}
    return [int(name in chosen) for name in task.labels]


def kappa(one: Ints, other: Ints, labels: int) -> float:
    """Cohen's kappa (1960) of two people's labels, NaN where chance alone would make them agree."""
    shares = [np.bincount(codes, minlength=labels) / len(one) for codes in (one, other)]
    apart = 1 - float(shares[0] @ shares[1])
    return 1 - float((one != other).mean()) / apart if apart else float("nan")
