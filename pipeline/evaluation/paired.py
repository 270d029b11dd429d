"""Two answers to the same gold rows, and how far their figures differ. Entry point: `paired`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.evaluation.intervals import Figure, difference, number_or_none
from pipeline.evaluation.metrics import measure_of
from pipeline.evaluation.resampling import RESAMPLES, Floats, Ints, bootstrap


@dataclass(frozen=True, slots=True)
class FigurePair:
    """A figure of two answers, and how much larger the first is, with its 95 % interval."""

    value: float | None
    other: float | None
    difference: Figure


@dataclass(frozen=True, slots=True)
class Paired:
    """The figures of two answers to the same rows."""

    rows: int
    figures: Mapping[str, FigurePair]  # by headline metric


def paired(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    other: Floats,  # [rows, labels]
    *,
    values: Sequence[float] = (),
    resamples: int = RESAMPLES,
) -> Paired:
    """How two answers to at least one row compare.

    Intervals are from a bootstrap that draws the same rows for both. `values` are the numbers of a
    score's labels.
    """
    rows, labels = p.shape
    own, others = (
        bootstrap(measure_of(truth, answers, values), rows, resamples=resamples, columns=labels)
        for answers in (p, other)
    )
    support = np.bincount(truth)
    rarest = int(support[support > 0].min())
    return Paired(
        rows=rows,
        figures={
            name: FigurePair(
                number_or_none(found[0]),
                number_or_none(others[name][0]),
                difference(found, others[name], rarest),
            )
            for name, found in own.items()
        },
    )
