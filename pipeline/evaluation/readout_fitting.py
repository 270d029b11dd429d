"""Trained readouts: a linear map for each layer, and its scores on held-out rows.

`fit` chooses the pooling, the layer, the regularisation and the scale of the logits by
cross-validation inside the rows that it fits to. The outer folds only measure (nested
cross-validation: Varma & Simon 2006). So a held-out row has no influence on its own score.

The layer is the cheapest one whose loss is within one standard error of the smallest loss: the
one-standard-error rule (Breiman, Friedman, Olshen and Stone 1984, "Classification and Regression
Trees", section 3.4.3). A lower layer is cheaper, because the model stops there.

Starting from the unembedding rows of the labels (their logits as a fixed offset, of which the fit
learns the difference) was tried and left out. After 20 rows of a question that SmolLM2-135M does
not understand (zero-shot AUROC 0.44), 20 splits, C of 0.01: AUROC 0.780 without it, 0.776 with 0.3
of the offset, 0.762 with all of it; after 100 rows 0.875, 0.874 and 0.871.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax
from sklearn.preprocessing import StandardScaler

from pipeline.evaluation.resampling import Floats, Ints, Split, folds
from pipeline.fitted.readout import LinearMap
from pipeline.options import FOLDS

STRENGTHS = (0.001, 0.01, 0.1)  # C of a logistic regression over standardised states
_INNER_FOLDS = 3
SEED = 20_26
# Label weights are used if the rarest label has less than half of an even share.
_RARE = 0.5
# Logits that separate all rows would be scaled without limit, and a label without rows would get an
# unlimited offset. A scale of 20, or odds of 20 to 1, is the limit.
_LARGEST = 3.0
# The largest part of the mean loss's gradient: far below what a fold's metrics can show.
_FIT = {"gtol": 1e-6, "ftol": 1e-13, "maxiter": 1_000}
# The logit of a label that no fitted row has; logits of other labels are near 0 on average.
_ABSENT_LOGIT = -10.0


def fit_logits(
    logits: Floats,  # [rows, labels], of rows that the map was not fitted to
    targets: Floats,  # [rows, labels]
    *,
    offsets: bool,
) -> tuple[float, Floats]:
    """The scale, and with `offsets` each label's offset, that minimise the cross-entropy.

    A map that was fitted with label weights is off by about the logarithm of these weights. The
    offsets correct that.
    """
    rows, labels = logits.shape

    def loss(flat: Floats) -> tuple[float, Floats]:
        scale, offset = np.exp(flat[0]), flat[1:]
        log_probabilities = log_softmax(scale * logits + offset, axis=1)
        error = (np.exp(log_probabilities) - targets) / rows
        gradient = np.concatenate([[scale * (error * logits).sum()], error.sum(axis=0)])
        return -(targets * log_probabilities).sum() / rows, gradient

    bounds = [(-_LARGEST, _LARGEST), *[(-_LARGEST, _LARGEST) if offsets else (0, 0)] * labels]
    best = minimize(loss, np.zeros(1 + labels), jac=True, method="L-BFGS-B", bounds=bounds).x
    return float(np.exp(best[0])), best[1:]


def log_losses(logits: Floats, targets: Floats) -> Floats:  # [rows, labels] each -> [rows]
    """The cross-entropy of each row."""
    return np.asarray(-(targets * log_softmax(logits, axis=1)).sum(axis=1), np.float64)


def row_weights(targets: Floats, balanced: bool) -> Floats:  # [rows, labels] -> [rows]
    """Weights of 1, or those that give every label that occurs the same total; they sum to rows."""
    rows, _ = targets.shape
    if not balanced:
        return np.ones(rows)
    counts = targets.sum(axis=0)
    by_label = np.divide(rows / (counts > 0).sum(), counts, where=counts > 0, out=0 * counts)
    return np.asarray(targets @ by_label, np.float64)


def fit_path(
    states: NDArray[np.floating],  # [rows, hidden]
    targets: Floats,  # [rows, labels]: rows of probabilities
    weights: Floats,  # [rows]
    *,
    strengths: Sequence[float],  # C, rising; a smaller C regularises more
) -> list[LinearMap]:  # one for each strength
    """Multinomial logistic regressions over standardised states, with an L2 penalty.

    Of two labels the penalised coefficients are those of the second's logit minus the first's.
    Each fit starts at the solution of the one before.
    """
    scaler = StandardScaler().fit(states.astype(np.float64))
    x = scaler.transform(states.astype(np.float64))
    labels, hidden = np.flatnonzero(targets.any(axis=0)), x.shape[1]
    if len(labels) == 1:
        return [_constant(labels, targets.shape[1], hidden)] * len(strengths)
    spread = np.array([[-0.5], [0.5]]) if len(labels) == 2 else np.eye(len(labels))
    own, shares = targets[:, labels], (weights / weights.sum())[:, None]

    def loss(flat: Floats, penalty: float) -> tuple[float, Floats]:
        *_, offset = at = flat.reshape(hidden + 1, -1)
        log_p = log_softmax((x @ at[:-1] + offset) @ spread.T, axis=1)
        error = shares * (np.exp(log_p) - own) @ spread
        gradient = np.vstack([x.T @ error + penalty * at[:-1], error.sum(axis=0)])
        value = penalty / 2 * (at[:-1] ** 2).sum() - (shares * own * log_p).sum()
        return float(value), gradient.ravel()

    flat, maps = np.zeros((hidden + 1) * spread.shape[1]), []
    for strength in strengths:
        penalty = (1 / (strength * weights.sum()),)
        # — a map that did not converge is judged by its loss on held-out rows, as any other
        flat = minimize(loss, flat, penalty, jac=True, method="L-BFGS-B", options=_FIT).x
        by_label = flat.reshape(hidden + 1, -1) @ spread.T
        map_ = _constant(labels, targets.shape[1], hidden)
        map_.weight[labels] = by_label[:-1].T / scaler.scale_
        map_.bias[labels] = by_label[-1]
        maps.append(LinearMap(map_.weight, map_.bias - map_.weight @ scaler.mean_))
    return maps


def _constant(present: NDArray[np.integer], labels: int, hidden: int) -> LinearMap:
    """The same logits for every state: 0 for labels that are present."""
    bias = np.full(labels, _ABSENT_LOGIT)
    bias[present] = 0
    return LinearMap(np.zeros((labels, hidden)), bias)


@dataclass(frozen=True, slots=True)
class GoldStates:
    """Hidden states of gold rows, with their labels.

    The states may be a file that is larger than memory: those of one place are copied at a time.
    """

    states: NDArray[np.float32]  # [rows that were read, layers, poolings, hidden]
    targets: Floats  # [rows, labels]: 1 at the gold label, or a teacher's probabilities
    groups: Ints  # [rows]: equal for equal texts
    rows: Ints | None = None  # [rows]: indices into the states; None: all, in order

    @property
    def truth(self) -> Ints:  # [rows]
        return np.asarray(self.targets.argmax(axis=1), np.int64)

    @property
    def balanced(self) -> bool:
        """Whether labels are so uneven that the fit weights them."""
        shares = self.targets.mean(axis=0)
        return bool(shares.min() < _RARE / len(shares))

    def part(self, rows: Ints) -> GoldStates:
        own = rows if self.rows is None else self.rows[rows]
        return GoldStates(self.states, self.targets[rows], self.groups[rows], own)

    def at(self, layer: int, pooling: int) -> NDArray[np.float32]:  # [rows, hidden]
        """The states of one layer and pooling."""
        of_place = self.states[:, layer, pooling]
        return of_place if self.rows is None else of_place[self.rows]


@dataclass(frozen=True, slots=True)
class Choice:
    """How to fit at one layer and pooling, and the loss of that fit on held-out rows."""

    loss: float  # mean of the rows
    standard_error: float  # of this mean
    strength: float
    scale: float
    offset: Floats  # [labels]
    held_out: Floats  # [rows, labels]: the probabilities of the rows, held out


Choices = list[list[Choice]]  # by layer, by pooling


@dataclass(frozen=True, slots=True)
class Fitted:
    """The maps, fitted to all rows, and the probabilities of rows while they were held out."""

    maps: tuple[LinearMap, ...]  # by layer, at the pooling
    choices: tuple[Choice, ...]  # by layer, at the pooling
    layer: int  # index of the chosen layer
    pooling: int
    best_choices: tuple[Choice, ...]  # by layer, at the pooling with the smallest loss there
    balanced: bool
    held_out: Floats  # [rows, labels]: layer and pooling chosen without the row
    by_layer: Floats  # [layers, rows, labels]: the pooling chosen without the row


def fit(gold: GoldStates, *, strengths: Sequence[float] = STRENGTHS) -> Fitted:
    """A readout of every layer."""
    _, layers, _, _ = gold.states.shape
    by_layer, held_out = np.empty((layers, *gold.targets.shape)), np.empty_like(gold.targets)
    for split in folds(gold.truth, gold.groups, number=FOLDS, seed=SEED):
        fitted, asked = gold.part(split.fitted), gold.part(split.held_out)
        choices = choose(fitted, strengths)
        layer, pooling = cheapest(choices)
        for n, of_layer in enumerate(choices):
            map_ = refit(fitted, n, pooling, of_layer[pooling])
            by_layer[n, split.held_out] = softmax(map_.logits(asked.at(n, pooling)), axis=1)
        held_out[split.held_out] = by_layer[layer, split.held_out]
    choices = choose(gold, strengths)
    layer, pooling = cheapest(choices)
    return Fitted(
        maps=tuple(refit(gold, n, pooling, choices[n][pooling]) for n in range(layers)),
        choices=tuple(of_layer[pooling] for of_layer in choices),
        layer=layer,
        pooling=pooling,
        best_choices=tuple(map(_best, choices)),
        balanced=gold.balanced,
        held_out=held_out,
        by_layer=by_layer,
    )


def row_losses(p: Floats, targets: Floats) -> Floats:  # [rows, labels] each -> [rows]
    """The cross-entropy of each row's probabilities."""
    return log_losses(np.log(np.maximum(p, np.finfo(np.float64).tiny)), targets)


def choose(gold: GoldStates, strengths: Sequence[float]) -> Choices:
    """How to fit at each layer and pooling, by cross-validation inside these rows."""
    _, layers, poolings, _ = gold.states.shape
    splits = folds(gold.truth, gold.groups, number=_INNER_FOLDS, seed=SEED + 1)
    return [
        [_choice(gold, layer, pooling, strengths, splits) for pooling in range(poolings)]
        for layer in range(layers)
    ]


def cheapest(choices: Choices) -> tuple[int, int]:
    """The lowest layer within one standard error of the smallest loss, and its best pooling."""
    best = [_best(of_layer) for of_layer in choices]
    smallest = _best(best)
    limit = smallest.loss + smallest.standard_error
    layer = next(n for n, choice in enumerate(best) if choice.loss <= limit)
    return layer, choices[layer].index(best[layer])


def _best(choices: Sequence[Choice]) -> Choice:
    """The first choice with the smallest loss."""
    return min(choices, key=lambda choice: choice.loss)


def refit(gold: GoldStates, layer: int, pooling: int, choice: Choice) -> LinearMap:
    """The map, fitted to all these rows, with the scale and the offset of the choice."""
    states, weights = gold.at(layer, pooling), row_weights(gold.targets, gold.balanced)
    [fitted] = fit_path(states, gold.targets, weights, strengths=[choice.strength])
    return fitted.scaled(choice.scale, choice.offset)


def _choice(
    gold: GoldStates, layer: int, pooling: int, strengths: Sequence[float], splits: Sequence[Split]
) -> Choice:
    rows, labels = gold.targets.shape
    states = gold.at(layer, pooling)
    logits = np.zeros((len(strengths), rows, labels))
    for split in splits:
        targets = gold.targets[split.fitted]
        weights = row_weights(targets, gold.balanced)
        # — fewer rows are regularised less, so that their logits are as large as those of all rows
        scaled = [strength * rows / len(split.fitted) for strength in strengths]
        path = fit_path(states[split.fitted], targets, weights, strengths=scaled)
        for of_strength, fitted in zip(logits, path, strict=True):
            of_strength[split.held_out] = fitted.logits(states[split.held_out])
    choices = []
    for strength, of_strength in zip(strengths, logits, strict=True):
        scale, offset = fit_logits(of_strength, gold.targets, offsets=gold.balanced)
        own_logits = scale * of_strength + offset
        losses = log_losses(own_logits, gold.targets)
        standard_error = float(losses.std(ddof=1) / np.sqrt(rows))
        own = Choice(
            float(losses.mean()),
            standard_error,
            strength,
            scale,
            offset,
            softmax(own_logits, axis=1),
        )
        choices.append(own)
    return _best(choices)
