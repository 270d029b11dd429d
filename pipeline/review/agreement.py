"""How far the labels of two people agree. Entry point: `agreements`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from pipeline.evaluation.metrics import Floats, Ints, mean_defined
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
    else:
        distance = None
        if task.kind == "score":
            numbers = np.arange(len(task.labels), dtype=np.float64)
            distance = (numbers[:, None] - numbers) ** 2
        one, other = codes.argmax(axis=2).T
        value = kappa(one, other, len(task.labels), distance)
    return None if np.isnan(value) else value


def one_hot(label: Label, task: TaskSpec) -> list[int]:  # [labels]
    """1 for the label, or for each of several."""
    chosen = {label} if isinstance(label, str) else {*label}
    return [int(name in chosen) for name in task.labels]


def kappa(one: Ints, other: Ints, labels: int, distance: Floats | None = None) -> float:
    """Cohen's kappa (1960) of two people's labels, NaN where chance alone would make them agree.

    `distance` [labels, labels] weights the disagreements (Cohen 1968); default: all alike.
    """
    weights = 1 - np.eye(labels) if distance is None else distance
    seen = np.zeros((labels, labels))
    np.add.at(seen, (one, other), 1)
    by_chance = np.outer(seen.sum(axis=1), seen.sum(axis=0)) / len(one)
    expected = float((weights * by_chance).sum())
    return 1 - float((weights * seen).sum()) / expected if expected else float("nan")
