"""All figures of one task's answers against gold labels, with intervals.

Knows probabilities, gold indices and labels' names. Knows nothing of where they come from or how
figures are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.evaluation import metrics
from pipeline.evaluation.metrics import (
    Bin,
    Floats,
    Ints,
    confidence_and_hits,
    expected_calibration_error,
    once,
    reliability_curve,
)

HEADLINES = ("accuracy", "f1", "auroc", "ap", "brier", "ece")
RESAMPLES = 1_000
# A ranking of every label in every resample is what takes the time: of more labels AUROC and
# average precision have no interval.
RANKED_LABELS = 100
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
    """The figures; there must be a row. The same rows give the same intervals.

    Above RANKED_LABELS labels `auroc` and `ap` have no interval: its ends are None.
    """
    rows, label_count = p.shape
    assert rows and label_count == len(labels) >= 2, (rows, label_count, labels)
    values = headlines(truth, p, once(rows))
    resampled = _resampled(truth, p, resamples)
    confusion = metrics.confusion(truth, p.argmax(axis=1), label_count)
    return Scores(
        rows=rows,
        headlines={
            name: _figure(values[name][0], resampled[name], corrected=name == "ece")
            for name in HEADLINES
        },
        labels=_label_scores(truth, p, labels),
        confusion=tuple(map(tuple, confusion.tolist())),
        reliability=reliability_curve(*confidence_and_hits(truth, p)),
        resamples=resamples,
    )


def headlines(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    counts: Floats,  # [resamples, rows]
    *,
    rank: bool = True,
) -> dict[str, Floats]:  # [resamples] each
    """Every headline figure of every resample; NaN for those of a ranking if not to `rank`."""
    _, labels = p.shape
    sums = metrics.sums(truth, p.argmax(axis=1), labels, counts)
    undefined = np.full(len(counts), np.nan)
    auroc, ap = _ranked_headlines(truth, p, counts) if rank else (undefined, undefined)
    return {
        "accuracy": metrics.accuracy(sums),
        "f1": metrics.mean_defined(metrics.f1(sums)),
        "auroc": auroc,
        "ap": ap,
        "brier": metrics.brier(truth, p, counts),
        "ece": expected_calibration_error(*confidence_and_hits(truth, p), counts),
    }


def _ranked_headlines(truth: Ints, p: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """AUROC and average precision, [resamples] each."""
    # — of two labels the first is asked for: the other's ranking is its mirror
    asked = range(1 if p.shape[1] == 2 else p.shape[1])
    found = []
    for label in asked:
        ranking = metrics.ranked(truth == label, p[:, label], counts)
        found.append((metrics.auroc(*ranking), metrics.average_precision(*ranking)))
    auroc, ap = (metrics.mean_defined(np.stack(each, axis=1)) for each in zip(*found, strict=True))
    return auroc, ap


def _resampled(truth: Ints, p: Floats, resamples: int) -> dict[str, Floats]:
    """[resamples] of each headline: rows drawn with replacement, as many as there are."""
    rows, labels = p.shape
    source = np.random.default_rng(_SEED)
    at_once = max(1, _BATCH_COUNTS // max(rows, labels))
    found: dict[str, list[Floats]] = {name: [] for name in HEADLINES}
    for start in range(0, resamples, at_once):
        number = min(at_once, resamples - start)
        drawn = source.integers(0, rows, (number, rows)) + rows * np.arange(number)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=number * rows).reshape(number, rows)
        rank = labels <= RANKED_LABELS
        for name, values in headlines(truth, p, counts.astype(np.float64), rank=rank).items():
            found[name].append(values)
    return {name: np.concatenate([np.zeros(0), *values]) for name, values in found.items()}


def _figure(
    value: float,
    resampled: Floats,  # [resamples]
    *,
    corrected: bool,
) -> Figure:
    """The percentiles of the resamples in which the figure is defined.

    Rows that stand twice make each bin's error larger, and so that of nearly every resample: for a
    calibration error what they have too much on average is taken off (bias correction: Efron and
    Tibshirani 1993, "An Introduction to the Bootstrap", chapter 10).
    """
    defined = resampled[~np.isnan(resampled)]
    if not len(defined):
        return Figure(_defined(value), None, None)
    low, high = np.percentile(defined, _PERCENTILES)
    if corrected:
        excess = float(np.mean(defined)) - value
        low, high = max(0.0, low - excess), max(0.0, high - excess)
    return Figure(_defined(value), float(low), float(high))


def _label_scores(truth: Ints, p: Floats, labels: Sequence[str]) -> tuple[LabelScore, ...]:
    sums = metrics.sums(truth, p.argmax(axis=1), len(labels), once(len(truth)))
    by_label = (metrics.precision(sums)[0], metrics.recall(sums)[0], metrics.f1(sums)[0])
    found = []
    for index, label in enumerate(labels):
        precision, recall, f1 = (_defined(values[index]) for values in by_label)
        ranking = metrics.ranked(truth == index, p[:, index], once(len(truth)))
        found.append(
            LabelScore(
                label=label,
                support=int(sums.support[0, index]),
                predicted=int(sums.predicted[0, index]),
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
