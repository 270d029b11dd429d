"""All figures of one task's answers against gold labels, with intervals.

Knows probabilities, gold indices and labels' names. Knows nothing of where they come from or how
figures are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.evaluation import metrics
from pipeline.evaluation.metrics import Floats, Ints, once
from pipeline.evaluation.reliability import (
    Bin,
    confidence_and_hits,
    expected_calibration_error,
    reliability_curve,
)

HEADLINES = ("accuracy", "f1", "auroc", "ap", "brier", "ece")
RESAMPLES = 1_000
_SEED = 20_26
_PERCENTILES = (2.5, 97.5)
# Of a batch of resamples, so many counts are held at once: 8 MB, a few times over. Four times as
# many took twice the time.
_BATCH_COUNTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure and its bootstrap 95 % interval; None where it is not defined."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class LabelScore:
    """One label against all others; None where a figure is not defined."""

    label: str
    support: int  # gold rows
    predicted: int
    precision: float | None
    recall: float | None
    f1: float | None
    auroc: float | None
    ap: float | None


@dataclass(frozen=True, slots=True)
class Scores:
    """How good a task's answers are."""

    rows: int
    headlines: Mapping[str, Figure]  # HEADLINES; f1 is macro, auroc and ap one against the rest
    labels: tuple[LabelScore, ...]
    confusion: tuple[tuple[int, ...], ...]  # by gold label, by predicted label
    reliability: tuple[Bin, ...]
    resamples: int


def score(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    labels: Sequence[str],
    *,
    resamples: int = RESAMPLES,
) -> Scores:
    """The figures; there must be a row. The same rows give the same intervals."""
    rows, label_count = p.shape
    assert rows and label_count == len(labels) >= 2, (rows, label_count, labels)
    values = headlines(truth, p, once(rows))
    resampled = _resampled(truth, p, resamples)
    table = metrics.confusion(truth, p.argmax(axis=1), label_count, once(rows))
    return Scores(
        rows=rows,
        headlines={
            name: Figure(_defined(values[name][0]), *_interval(resampled[name]))
            for name in HEADLINES
        },
        labels=_label_scores(truth, p, labels, table),
        confusion=tuple(tuple(int(count) for count in row) for row in table[0]),
        reliability=reliability_curve(*confidence_and_hits(truth, p)),
        resamples=resamples,
    )


def headlines(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    counts: Floats,  # [resamples, rows]
) -> dict[str, Floats]:  # [resamples] each
    """Every headline figure of every resample."""
    _, labels = p.shape
    table = metrics.confusion(truth, p.argmax(axis=1), labels, counts)
    # — of two labels the first is asked for: the other's ranking is its mirror
    asked = range(1 if labels == 2 else labels)
    rankings = [metrics.ranked(truth == label, p[:, label], counts) for label in asked]
    auroc = [metrics.auroc(*ranking) for ranking in rankings]
    ap = [metrics.average_precision(*ranking) for ranking in rankings]
    return {
        "accuracy": metrics.accuracy(table),
        "f1": metrics.mean_defined(metrics.f1(table)),
        "auroc": metrics.mean_defined(np.stack(auroc, axis=1)),
        "ap": metrics.mean_defined(np.stack(ap, axis=1)),
        "brier": metrics.brier(truth, p, counts),
        "ece": expected_calibration_error(*confidence_and_hits(truth, p), counts),
    }


def _resampled(truth: Ints, p: Floats, resamples: int) -> dict[str, Floats]:
    """[resamples] of each headline: rows drawn with replacement, as many as there are."""
    rows = len(truth)
    source = np.random.default_rng(_SEED)
    at_once = max(1, _BATCH_COUNTS // rows)
    found: dict[str, list[Floats]] = {name: [] for name in HEADLINES}
    for start in range(0, resamples, at_once):
        number = min(at_once, resamples - start)
        drawn = source.integers(0, rows, (number, rows)) + rows * np.arange(number)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=number * rows).reshape(number, rows)
        for name, values in headlines(truth, p, counts.astype(np.float64)).items():
            found[name].append(values)
    return {name: np.concatenate([np.zeros(0), *values]) for name, values in found.items()}


def _interval(values: Floats) -> tuple[float | None, float | None]:
    """The percentiles of the resamples in which the figure is defined."""
    defined = values[~np.isnan(values)]
    if not len(defined):
        return None, None
    low, high = np.percentile(defined, _PERCENTILES)
    return float(low), float(high)


def _label_scores(
    truth: Ints, p: Floats, labels: Sequence[str], table: Floats
) -> tuple[LabelScore, ...]:
    by_label = (metrics.precision(table)[0], metrics.recall(table)[0], metrics.f1(table)[0])
    found = []
    for index, label in enumerate(labels):
        precision, recall, f1 = (_defined(values[index]) for values in by_label)
        ranking = metrics.ranked(truth == index, p[:, index], once(len(truth)))
        found.append(
            LabelScore(
                label=label,
                support=int(table[0, index].sum()),
                predicted=int(table[0, :, index].sum()),
                precision=precision,
                recall=recall,
                f1=f1,
                auroc=_defined(metrics.auroc(*ranking)[0]),
                ap=_defined(metrics.average_precision(*ranking)[0]),
            )
        )
    return tuple(found)


def _defined(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
