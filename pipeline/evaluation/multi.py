"""Figures of a task of kind `multi` as a whole: means over its labels. Entry: `multi_figures`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.intervals import Figure, interval
from pipeline.evaluation.metrics import mean_defined, ranked, ratio
from pipeline.evaluation.resampling import draws

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MULTI_HEADLINES = ("macro_f1", "macro_auroc")
_SEED = 20_26
_AT_ONCE = 100  # resamples


@dataclass(frozen=True, slots=True)
class LabelRows:
    """The rows by which one label is judged."""

    rows: Ints  # [rows]: among those of the task, rising
    applies: Bools  # [rows]: by gold
    p: Floats  # [rows]: that the label applies; at .5 or more it is predicted


def multi_figures(
    labels: Sequence[LabelRows],
    rows: int,  # of the task
    *,
    resamples: int,
) -> Mapping[str, Figure]:
    """MULTI_HEADLINES with 95 % intervals from a bootstrap of the rows.

    They are means of F1 and of AUROC over the labels for which these are defined. The same rows
    are drawn for all labels, because a document's labels depend on each other.
    """
    source = np.random.default_rng(_SEED)
    measured = [_means(labels, np.ones((1, rows)))]
    for start in range(0, resamples, _AT_ONCE):
        counts = draws(source, min(_AT_ONCE, resamples - start), rows)
        measured.append(_means(labels, counts))
    # — a mean over labels is as uncertain as the rarest of them
    rarest = min(
        int(side.sum())
        for label in labels
        for side in (label.applies, ~label.applies)
        if side.any()
    )
    figures = {}
    for name, values in zip(MULTI_HEADLINES, np.concatenate(measured, axis=1), strict=True):
        figures[name] = interval(float(values[0]), values[1:], rows=rows, rarest=rarest)
    return figures


def _means(labels: Sequence[LabelRows], counts: Floats) -> Floats:  # [2, resamples]
    """Macro F1 and macro AUROC of each resample; `counts` is [resamples, rows]."""
    f1, auroc = [], []
    for label in labels:
        own = counts[:, label.rows]
        predicted = label.p >= 0.5
        hits = own @ (label.applies & predicted)
        f1.append(ratio(2 * hits, own @ label.applies + own @ predicted))
        auroc.append(ranked(label.applies, label.p, own)[0])
    return np.stack([mean_defined(np.stack(of_labels, axis=1)) for of_labels in (f1, auroc)])
