"""How good a readout is after so many gold rows: random splits, again and again.

Knows states, targets and splits. Knows nothing of models, text or files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.evaluation.fitting import SEED, STRENGTHS, GoldStates, choose, refit
from pipeline.evaluation.folds import random_split
from pipeline.evaluation.linear import one_thread, probabilities
from pipeline.evaluation.metrics import once
from pipeline.evaluation.scores import Figure, headlines

HELD_OUT = 200
SPLITS = 20
FIGURES = ("auroc", "f1", "accuracy", "ece")
_PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Learned:
    """The figures after so many rows: the mean over the splits, and where 95 % of them lie."""

    rows: int
    figures: dict[str, Figure]  # FIGURES


@one_thread()
def learning_curve(
    gold: GoldStates,  # of one layer and pooling
    rows: Sequence[int],
    *,
    held_out: int = HELD_OUT,
    splits: int = SPLITS,
    advance: Callable[[], None] = lambda: None,
) -> tuple[Learned, ...]:
    """The figures for each number of rows; what is regularised is chosen inside those rows."""
    found = []
    for number in rows:
        by_split = []
        for split in range(splits):
            by_split.append(_figures(gold, number, held_out, SEED + split))
            advance()
        figures = {name: _spread([of[name] for of in by_split]) for name in FIGURES}
        found.append(Learned(number, figures))
    return tuple(found)


def _figures(gold: GoldStates, rows: int, held_out: int, seed: int) -> dict[str, float]:
    split = random_split(gold.truth, gold.groups, fitted=rows, held_out=held_out, seed=seed)
    fitted, asked = gold.part(split.fitted), gold.part(split.held_out)
    map_ = refit(fitted, 0, 0, choose(fitted, STRENGTHS)[0][0])
    p = probabilities(map_.logits(asked.states[:, 0, 0]))
    values = headlines(asked.truth, p, once(len(p)))
    return {name: float(values[name][0]) for name in FIGURES}


def _spread(values: Sequence[float]) -> Figure:
    defined = [value for value in values if not np.isnan(value)]
    if not defined:
        return Figure(None, None, None)
    low, high = np.percentile(defined, _PERCENTILES)
    return Figure(float(np.mean(defined)), float(low), float(high))
