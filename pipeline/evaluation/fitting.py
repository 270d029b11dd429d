"""Trained readouts: one linear map a layer, and what each is worth on rows it has not seen.

Whatever is chosen (the pooling, the layer, how much is regularised, the calibration) is chosen by
cross-validation inside the rows that are fitted to, so that the held-out rows have no part in it.
Knows states, targets and groups. Knows nothing of models, text or files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.folds import folds, random_split
from pipeline.evaluation.linear import (
    Floats,
    Linear,
    balanced_weights,
    calibration,
    fit_path,
    log_loss,
    one_thread,
    probabilities,
)
from pipeline.evaluation.metrics import once
from pipeline.evaluation.scores import Figure, headlines

Ints = NDArray[np.int64]

STRENGTHS = (0.001, 0.01, 0.1)  # C of a logistic regression over standardised states
FOLDS = 5
_INNER_FOLDS = 3
SEED = 20_26
# Labels weigh the same where the rarest has less than half of its even share.
_RARE = 0.5


@dataclass(frozen=True, slots=True)
class GoldStates:
    """Rows with what is known of them."""

    states: NDArray[np.float32]  # [rows, layers, poolings, hidden]
    targets: Floats  # [rows, labels]: 1 at the gold label, or a teacher's probabilities
    groups: Ints  # [rows]: equal for equal texts

    @property
    def truth(self) -> Ints:  # [rows]
        return np.asarray(self.targets.argmax(axis=1), np.int64)

    @property
    def balanced(self) -> bool:
        """Whether labels are so uneven that each is made to weigh the same."""
        shares = self.targets.mean(axis=0)
        return bool(shares.min() < _RARE / len(shares))

    def part(self, rows: Ints) -> GoldStates:
        return GoldStates(self.states[rows], self.targets[rows], self.groups[rows])

    def at(self, layer: int, pooling: int) -> GoldStates:
        """The same rows, read at one place."""
        states = self.states[:, layer : layer + 1, pooling : pooling + 1]
        return GoldStates(states, self.targets, self.groups)


@dataclass(frozen=True, slots=True)
class Choice:
    """How to fit at one layer and pooling, and the loss it had on rows that were held out."""

    loss: float
    strength: float
    scale: float
    offset: Floats  # [labels]


Choices = list[list[Choice]]  # by layer, by pooling


@dataclass(frozen=True, slots=True)
class Fitted:
    """The maps, fitted to all rows, and the probabilities that rows got while held out."""

    maps: tuple[Linear, ...]  # by layer, at the pooling
    choices: tuple[Choice, ...]  # by layer, at the pooling
    layer: int  # the place of the best among them
    pooling: int
    balanced: bool
    held_out: Floats  # [rows, labels]: layer and pooling as chosen without the row
    by_layer: Floats  # [layers, rows, labels]: the pooling as chosen without the row
    by_place: Floats  # [layers, poolings, rows, labels]


@one_thread()
def fit(
    gold: GoldStates,
    *,
    strengths: Sequence[float] = STRENGTHS,
    folds_number: int = FOLDS,
    advance: Callable[[], None] = lambda: None,
) -> Fitted:
    """A readout of every layer; `advance` hears of each fold, and of the fit to all rows."""
    rows, layers, poolings, _ = gold.states.shape
    by_place = np.empty((layers, poolings, rows, gold.targets.shape[1]))
    by_layer, held_out = np.empty_like(by_place[:, 0]), np.empty_like(gold.targets)
    for split in folds(gold.truth, gold.groups, number=folds_number, seed=SEED):
        fitted, asked = gold.part(split.fitted), gold.part(split.held_out)
        choices = choose(fitted, strengths)
        for layer in range(layers):
            for pooling in range(poolings):
                map_ = refit(fitted, layer, pooling, choices[layer][pooling])
                p = probabilities(map_.logits(asked.states[:, layer, pooling]))
                by_place[layer, pooling, split.held_out] = p
        layer, pooling = best(choices)
        by_layer[:, split.held_out] = by_place[:, pooling, split.held_out]
        held_out[split.held_out] = by_place[layer, pooling, split.held_out]
        advance()
    choices = choose(gold, strengths)
    layer, pooling = best(choices)
    maps = [refit(gold, n, pooling, choices[n][pooling]) for n in range(layers)]
    advance()
    return Fitted(
        maps=tuple(maps),
        choices=tuple(of_layer[pooling] for of_layer in choices),
        layer=layer,
        pooling=pooling,
        balanced=gold.balanced,
        held_out=held_out,
        by_layer=by_layer,
        by_place=by_place,
    )


def choose(gold: GoldStates, strengths: Sequence[float]) -> Choices:
    """How to fit at each place, by cross-validation inside these rows."""
    _, layers, poolings, _ = gold.states.shape
    return [
        [_choice(gold, layer, pooling, strengths) for pooling in range(poolings)]
        for layer in range(layers)
    ]


def best(choices: Choices) -> tuple[int, int]:
    """The place, as layer and pooling, of the smallest loss; of equals the first."""
    losses = np.array([[choice.loss for choice in of_layer] for of_layer in choices])
    layer, pooling = np.unravel_index(int(losses.argmin()), losses.shape)
    return int(layer), int(pooling)


def refit(gold: GoldStates, layer: int, pooling: int, choice: Choice) -> Linear:
    """The map of all these rows, calibrated."""
    states, weights = gold.states[:, layer, pooling], _weights(gold.targets, gold.balanced)
    [fitted] = fit_path(states, gold.targets, weights, strengths=[choice.strength])
    return fitted.scaled(choice.scale, choice.offset)


def _choice(gold: GoldStates, layer: int, pooling: int, strengths: Sequence[float]) -> Choice:
    rows, labels = gold.targets.shape
    states = gold.states[:, layer, pooling]
    logits = np.zeros((len(strengths), rows, labels))
    for split in folds(gold.truth, gold.groups, number=_INNER_FOLDS, seed=SEED + 1):
        targets = gold.targets[split.fitted]
        weights = _weights(targets, gold.balanced)
        # — fewer rows are regularised less, so that their logits are of the size that all give
        here = [strength * rows / len(split.fitted) for strength in strengths]
        path = fit_path(states[split.fitted], targets, weights, strengths=here)
        for of_strength, fitted in zip(logits, path, strict=True):
            of_strength[split.held_out] = fitted.logits(states[split.held_out])
    found = []
    for strength, of_strength in zip(strengths, logits, strict=True):
        scale, offset = calibration(of_strength, gold.targets, offsets=gold.balanced)
        loss = log_loss(scale * of_strength + offset, gold.targets, np.ones(rows))
        found.append(Choice(loss, strength, scale, offset))
    return min(found, key=lambda choice: choice.loss)


def _weights(targets: Floats, balanced: bool) -> Floats:  # [rows, labels] -> [rows]
    return balanced_weights(targets) if balanced else np.ones(len(targets))


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
