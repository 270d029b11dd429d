"""The readout fitted to the labels so far, and how good it is. Entry point: `refit`.

Of a task of kind `multi`, each label has a readout of yes or no.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax
from threadpoolctl import threadpool_limits

from pipeline.evaluation.intervals import Figure
from pipeline.evaluation.metrics import Floats, Ints, score
from pipeline.evaluation.multi import LabelRows, multi_figures
from pipeline.evaluation.readout_fitting import GoldStates, fit
from pipeline.spec.tasks import TaskSpec

LEAST = 2  # rows with a label, and rows without it, to fit a readout of it
_RESAMPLES = 200
_SEED = 20_26
_LEAST_P = 1e-6  # of a loss

Place = tuple[int, int]  # indices of a layer and a pooling


@dataclass(frozen=True, slots=True)
class Refit:
    """A readout of the pool's states, and its figures on rows that were held out."""

    rows: Ints  # [labelled]: of the pool, to which it was fitted
    targets: Floats  # [labelled, labels]
    held_out: Floats  # [labelled, labels]: p of each row by a fit without it
    p: Floats  # [pool, labels]; of `multi` each of yes
    figures: Mapping[str, Figure]  # by metric
    metric: str  # the one that is shown
    places: tuple[Place | None, ...]  # by part; None: a constant

    @property
    def quality(self) -> Figure:
        """The figure that is shown."""
        return self.figures[self.metric]


def main_metric(task: TaskSpec) -> str:
    """AUROC of two labels, macro F1 of more, weighted kappa of a score, macro AUROC of `multi`."""
    if task.kind == "choice":
        return "f1" if len(task.labels) > 2 else "auroc"
    return "qwk" if task.kind == "score" else "macro_auroc"


def can_fit(task: TaskSpec, targets: Floats) -> bool:  # [labelled, labels]
    """Whether two labels, or a label and its absence, have enough rows."""
    yes = targets.sum(axis=0)
    if task.kind == "multi":
        return bool((np.minimum(yes, len(targets) - yes) >= LEAST).any())
    return int((yes >= LEAST).sum()) >= 2


def refit(
    task: TaskSpec,
    states: NDArray[np.float32],  # [pool, layers, poolings, hidden]
    groups: Ints,  # [pool]: equal for equal texts
    rows: Ints,  # [labelled]: of the pool
    targets: Floats,  # [labelled, labels]: 1 for the label, or for each of several
    places: Sequence[Place | None] | None = None,  # of an earlier fit, to fit there alone
) -> Refit:
    """Readouts fitted as by `assay fit`, with the same cross-validation.

    Layer and pooling are chosen as there unless `places` has them: to choose takes longer.
    """
    gold = _Gold(states, groups, rows)
    with threadpool_limits(1, user_api="blas"):
        if task.kind != "multi":
            part = gold.fitted(targets, places[0] if places else None)
            truth, labels = targets.argmax(axis=1), list(task.labels)
            scores = score(truth, part.held_out, labels, values=task.values, resamples=_RESAMPLES)
            return Refit(
                rows,
                targets,
                part.held_out,
                part.p,
                scores.headlines,
                main_metric(task),
                (part.place,),
            )
        pairs = [np.stack([yes, 1 - yes], axis=1) for yes in targets.T]
        known = places or [None] * len(pairs)
        parts = [gold.fitted(pair, place) for pair, place in zip(pairs, known, strict=True)]
    held_out = np.stack([part.held_out[:, 0] for part in parts], axis=1)
    every = np.arange(len(rows))
    by_label = [
        LabelRows(every, applies, p) for applies, p in zip(targets.T == 1, held_out.T, strict=True)
    ]
    return Refit(
        rows=rows,
        targets=targets,
        held_out=held_out,
        p=np.stack([part.p[:, 0] for part in parts], axis=1),
        figures=multi_figures(by_label, len(rows), resamples=_RESAMPLES),
        metric=main_metric(task),
        places=tuple(part.place for part in parts),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    held_out: Floats  # [labelled, labels]
    p: Floats  # [pool, labels]
    place: Place | None


@dataclass(frozen=True, slots=True)
class _Gold:
    """The states of the pool, and which of its rows have labels."""

    states: NDArray[np.float32]
    groups: Ints
    rows: Ints

    def fitted(self, targets: Floats, place: Place | None) -> _Part:
        """A readout at the place, or at the best one; a constant if one label has nearly all."""
        counts = targets.sum(axis=0)
        if (counts >= LEAST).sum() < 2:
            share = (counts + 0.5) / (counts + 0.5).sum()
            pool = len(self.states)
            return _Part(np.tile(share, (len(targets), 1)), np.tile(share, (pool, 1)), None)
        states, first = self.states, (0, 0)
        if place is not None:
            layer, pooling = first = place
            states = states[:, layer : layer + 1, pooling : pooling + 1]
        gold = GoldStates(states, targets, self.groups[self.rows], self.rows)
        fitted = fit(gold)
        logits = fitted.maps[fitted.layer].logits(states[:, fitted.layer, fitted.pooling])
        chosen = first[0] + fitted.layer, first[1] + fitted.pooling
        return _Part(fitted.held_out, np.asarray(softmax(logits, axis=1), np.float64), chosen)


def losses(task: TaskSpec, p: Floats, targets: Floats) -> Floats:  # [rows, labels] x2 -> [rows]
    """The cross-entropy of each row; of `multi` summed over the labels."""
    log = targets * np.log(np.maximum(p, _LEAST_P))
    if task.kind == "multi":
        log = log + (1 - targets) * np.log(np.maximum(1 - p, _LEAST_P))
    return np.asarray(-log.sum(axis=1), np.float64)


def labels_pay(task: TaskSpec, fits: Sequence[Refit]) -> bool | None:
    """Whether the labels that doubled their number made the readout better; None: too few.

    The last fit is compared with one to half as many labels, on the rows that were labelled after
    that one. Neither has seen these rows when it answers them. Labels pay while the mean loss of a
    row falls by more than the standard error of this mean, which is also how `assay fit` chooses a
    layer. The next doubling teaches less than the last one.
    """
    *_, last = fits
    half = [each for each in fits if 2 * len(each.rows) <= len(last.rows)]
    if not half:
        return None
    new = ~np.isin(last.rows, half[-1].rows)
    before = losses(task, half[-1].p[last.rows[new]], last.targets[new])
    gain = before - losses(task, last.held_out[new], last.targets[new])
    return bool(gain.mean() > gain.std(ddof=1) / np.sqrt(len(gain)))
