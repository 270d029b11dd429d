"""All scores of one task's answers against gold labels, with intervals. Entry point: `score`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.metrics import confusion_matrix

from pipeline.evaluation.metrics import (
    Bin,
    Floats,
    Ints,
    LabelMetrics,
    confidence_and_hits,
    label_metrics,
    reliability_curve,
    resampled_metrics,
    task_metrics,
)

HEADLINES = ("accuracy", "f1", "auroc", "ap", "brier", "ece")
RESAMPLES = 1_000
# Ranking every label in every resample takes most of the time: above this number of labels, AUROC
# and average precision have no interval.
RANKED_LABELS = 100
_SEED = 20_26
PERCENTILES = (2.5, 97.5)
# Counts in one batch of resamples: 8 MB, a few times over. Batches of four times this size took
# twice the time.
_BATCH_COUNTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric and its 95 % interval; None where it is undefined."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class LabelScore:
    """One label against all others; None where a metric is undefined."""

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
    """The scores of at least one row. The same rows give the same intervals.

    Above RANKED_LABELS labels `auroc` and `ap` have no interval: both ends are None.
    """
    rows, label_count = p.shape
    assert rows and label_count == len(labels) >= 2, (rows, label_count, labels)
    by_label = label_metrics(truth, p)
    values = task_metrics(truth, p, by_label)
    resampled = _resampled(truth, p, resamples)
    confusion = confusion_matrix(truth, p.argmax(axis=1), labels=range(label_count))
    return Scores(
        rows=rows,
        headlines={
            name: _figure(values[name], resampled[name], bias_corrected=name == "ece")
            for name in HEADLINES
        },
        labels=_label_scores(by_label, labels, confusion.sum(axis=0)),
        confusion=tuple(map(tuple, confusion.tolist())),
        reliability=reliability_curve(*confidence_and_hits(truth, p)),
        resamples=resamples,
    )


def _resampled(truth: Ints, p: Floats, resamples: int) -> dict[str, Floats]:
    """[resamples] of each headline: samples of the same size, drawn with replacement."""
    rows, labels = p.shape
    source = np.random.default_rng(_SEED)
    at_once = max(1, _BATCH_COUNTS // max(rows, labels))
    batches: dict[str, list[Floats]] = {name: [np.zeros(0)] for name in HEADLINES}
    for start in range(0, resamples, at_once):
        number = min(at_once, resamples - start)
        drawn = source.integers(0, rows, (number, rows)) + rows * np.arange(number)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=number * rows).reshape(number, rows)
        batch = resampled_metrics(truth, p, counts.astype(np.float64), rank=labels <= RANKED_LABELS)
        for name in HEADLINES:
            batches[name].append(batch[name])
    return {name: np.concatenate(of_batches) for name, of_batches in batches.items()}


def _figure(
    value: float,
    resampled: Floats,  # [resamples]
    *,
    bias_corrected: bool,
) -> Figure:
    """A percentile interval over the resamples in which the metric is defined.

    Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13. Rows that are drawn
    twice raise a calibration error in nearly every resample. So its interval is shifted by the
    bootstrap estimate of bias (chapter 10).
    """
    defined = resampled[~np.isnan(resampled)]
    if not len(defined):
        return Figure(number_or_none(value), None, None)
    low, high = np.percentile(defined, PERCENTILES)
    if bias_corrected:
        bias = float(np.mean(defined)) - value
        low, high = max(0.0, low - bias), max(0.0, high - bias)
    return Figure(number_or_none(value), float(low), float(high))


def _label_scores(
    by_label: LabelMetrics, labels: Sequence[str], predicted: Ints
) -> tuple[LabelScore, ...]:
    names = ("precision", "recall", "f1", "auroc", "ap")
    return tuple(
        LabelScore(
            label=label,
            support=int(by_label.support[index]),
            predicted=int(predicted[index]),
            **{name: number_or_none(getattr(by_label, name)[index]) for name in names},
        )
        for index, label in enumerate(labels)
    )


def number_or_none(value: float) -> float | None:
    """The value, or None for NaN, which JSON cannot represent."""
    return None if np.isnan(value) else float(value)
