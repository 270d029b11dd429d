"""Metrics of probabilities against gold labels, with intervals. Entry point: `score`.

`task_metrics` computes each metric once, by scikit-learn. `resampled_metrics` computes the same
metrics for many bootstrap resamples at once. A resample is a row of `counts`: how often each row
was drawn. scikit-learn takes one resample at a time: 1,000 resamples of 1,000 rows take it 6 s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.metrics import (
    average_precision_score,
    confusion_matrix,
    precision_recall_fscore_support,
    roc_auc_score,
)

from pipeline.options import RESAMPLES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

HEADLINES = ("accuracy", "f1", "auroc", "ap", "brier", "ece")
LABEL_METRICS = ("precision", "recall", "f1", "auroc", "ap")
BINS = 15  # of the calibration error, as in Guo et al. 2017
# Ranking every label in every resample takes most of the time: above this number of labels, AUROC
# and average precision have no interval.
RANKED_LABELS = 100
_SEED = 20_26
_PERCENTILES = (2.5, 97.5)
# Counts in one batch of resamples: 8 MB, a few times over. Batches of four times this size took
# twice the time.
_BATCH_COUNTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Bin:
    """Rows of similar confidence, and the share of them that is right."""

    rows: int
    confidence: float  # mean
    accuracy: float


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
    by_side = zip(confusion.sum(axis=1), confusion.sum(axis=0), strict=True)  # gold, predicted
    of_labels = zip(*(by_label[name] for name in LABEL_METRICS), strict=True)
    return Scores(
        rows=rows,
        headlines={
            name: interval(values[name], resampled[name], bias_corrected=name == "ece")
            for name in HEADLINES
        },
        labels=tuple(
            LabelScore(label, *map(int, counts), *map(number_or_none, figures))
            for label, counts, figures in zip(labels, by_side, of_labels, strict=True)
        ),
        confusion=tuple(map(tuple, confusion.tolist())),
        reliability=reliability_curve(*confidence_and_hits(truth, p)),
        resamples=resamples,
    )


def _resampled(truth: Ints, p: Floats, resamples: int) -> dict[str, Floats]:
    """[resamples] of each headline: samples of the same size, drawn with replacement."""
    rows, labels = p.shape
    source = np.random.default_rng(_SEED)
    at_once = max(1, _BATCH_COUNTS // max(rows, labels))
    rank = labels <= RANKED_LABELS
    batches = []
    for start in range(0, resamples, at_once):
        number = min(at_once, resamples - start)
        drawn = source.integers(0, rows, (number, rows)) + rows * np.arange(number)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=number * rows).reshape(number, rows)
        batches.append(resampled_metrics(truth, p, counts.astype(np.float64), rank=rank))
    empty = np.zeros(0)
    return {name: np.concatenate([empty, *(b[name] for b in batches)]) for name in HEADLINES}


def interval(
    value: float,
    resampled: Floats,  # [resamples]
    *,
    bias_corrected: bool = False,
) -> Figure:
    """A percentile interval over the resamples in which the metric is defined.

    Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13. Rows that are drawn
    twice raise a calibration error in nearly every resample. So its interval is shifted by the
    bootstrap estimate of bias (chapter 10).
    """
    defined = resampled[~np.isnan(resampled)]
    if not len(defined):
        return Figure(number_or_none(value), None, None)
    low, high = np.percentile(defined, _PERCENTILES)
    if bias_corrected:
        bias = float(np.mean(defined)) - value
        low, high = max(0.0, low - bias), max(0.0, high - bias)
    return Figure(number_or_none(value), float(low), float(high))


def number_or_none(value: float) -> float | None:
    """The value, or None for NaN, which JSON cannot represent."""
    return None if np.isnan(value) else float(value)


def label_metrics(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
) -> dict[str, Floats]:  # [labels] each
    """LABEL_METRICS of every label against all others; NaN where one is undefined.

    Precision is undefined for a label that is never predicted, recall for a label without a gold
    row, F1 for a label with neither. A ranking needs a row with the label and one without.
    """
    rows, labels = p.shape
    precision, recall, f1, support = precision_recall_fscore_support(
        truth, p.argmax(axis=1), labels=range(labels), zero_division=np.nan
    )
    auroc, ap = np.full((2, labels), np.nan)
    for label in np.flatnonzero(support):
        positive = truth == label
        ap[label] = average_precision_score(positive, p[:, label])
        if support[label] < rows:
            auroc[label] = roc_auc_score(positive, p[:, label])
    return {"precision": precision, "recall": recall, "f1": f1, "auroc": auroc, "ap": ap}


def task_metrics(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    by_label: Mapping[str, Floats] | None = None,  # if already computed
) -> dict[str, float]:
    """The metrics of a whole task; NaN where a metric is undefined.

    F1, AUROC and average precision are means over the labels for which they are defined. With two
    labels, AUROC and average precision are those of the first label.
    """
    each = by_label or label_metrics(truth, p)
    ranked = slice(1 if p.shape[1] == 2 else None)
    confidence, hits = confidence_and_hits(truth, p)
    bins = _bins(confidence)
    return {
        "accuracy": float(hits.mean()),
        "f1": float(mean_defined(each["f1"])),
        "auroc": float(mean_defined(each["auroc"][ranked])),
        "ap": float(mean_defined(each["ap"][ranked])),
        "brier": float(_squared_errors(truth, p).mean()),
        "ece": float(np.abs(np.bincount(bins, hits - confidence)).sum() / len(p)),
    }


def resampled_metrics(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    counts: Floats,  # [resamples, rows]; each row of it sums to the number of rows
    *,
    rank: bool = True,
) -> dict[str, Floats]:  # [resamples] each
    """The metrics of `task_metrics` for every resample; without `rank`, AUROC and `ap` are NaN."""
    rows, labels = p.shape
    confidence, hits = confidence_and_hits(truth, p)
    gold, predicted = _one_hot(truth, labels), _one_hot(p.argmax(axis=1), labels)
    f1 = _ratio(
        2 * (counts @ gold.multiply(hits[:, None]).tocsr()), counts @ gold + counts @ predicted
    )
    auroc = ap = np.full((len(counts), 1), np.nan)
    if rank:
        ranked = range(1 if labels == 2 else labels)
        pairs = [_ranked(truth == label, p[:, label], counts) for label in ranked]
        auroc, ap = (np.stack(each, axis=1) for each in zip(*pairs, strict=True))
    return {
        "accuracy": counts @ hits / rows,
        "f1": mean_defined(f1),
        "auroc": mean_defined(auroc),
        "ap": mean_defined(ap),
        "brier": counts @ _squared_errors(truth, p) / rows,
        "ece": _calibration_errors(confidence, hits, counts),
    }


def _ranked(
    positive: Bools,  # [rows]
    score: Floats,  # [rows]
    counts: Floats,  # [resamples, rows]
) -> tuple[Floats, Floats]:  # [resamples] each
    """AUROC and average precision of every resample; NaN where a resample lacks a side.

    AUROC is the probability that a positive row scores above a negative one; a tie counts half.
    Average precision is the precision at each threshold, weighted by the recall that it adds.
    """
    order = np.argsort(-score, kind="stable")
    ordered = score[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])  # of equal scores
    weights = counts[:, order]
    hits = np.add.reduceat(weights * positive[order], starts, axis=1)  # [resamples, scores]
    misses = np.add.reduceat(weights, starts, axis=1) - hits
    all_hits, all_misses = hits.cumsum(axis=1), misses.cumsum(axis=1)
    positives, negatives = all_hits[:, -1], all_misses[:, -1]
    below = negatives[:, None] - all_misses + misses / 2
    precision = all_hits / np.maximum(all_hits + all_misses, 1)
    return (
        _ratio((hits * below).sum(axis=1), positives * negatives),
        _ratio((hits * precision).sum(axis=1), positives),
    )


def _calibration_errors(
    confidence: Floats,  # [rows]
    hits: Bools,  # [rows]
    counts: Floats,  # [resamples, rows]
) -> Floats:  # [resamples]
    """The expected calibration error of every resample, whose bins are its own."""
    resamples, rows = counts.shape
    order = np.argsort(confidence, kind="stable")
    ordered, weights = confidence[order], counts[:, order]
    first = np.searchsorted(ordered, ordered, side="left")  # of the rows of equal confidence
    less_confident = (weights.cumsum(axis=1) - weights)[:, first]
    # — a row that a resample lacks may be above all that it has
    bins = np.minimum(BINS * less_confident // rows, BINS - 1).astype(np.int64)
    cells = bins + BINS * np.arange(resamples)[:, None]
    excess = weights * (hits - confidence)[order]
    sums = np.bincount(cells.ravel(), excess.ravel(), minlength=resamples * BINS)
    return np.asarray(np.abs(sums.reshape(resamples, BINS)).sum(axis=1) / rows, np.float64)


def confidence_and_hits(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
) -> tuple[Floats, Bools]:  # [rows] each
    """The predicted label's probability, and whether that label is the gold label."""
    rows, _ = p.shape
    predicted = p.argmax(axis=1)
    return p[np.arange(rows), predicted], predicted == truth


def reliability_curve(
    confidence: Floats,  # [rows]
    hits: Bools,  # [rows]
) -> tuple[Bin, ...]:
    """The bins of the calibration error that are not empty, the least confident first.

    scikit-learn's `calibration_curve` does not return how many rows a bin has.
    """
    bins = _bins(confidence)
    rows = np.bincount(bins)
    means = (np.bincount(bins, values)[rows > 0] / rows[rows > 0] for values in (confidence, hits))
    return tuple(map(Bin, rows[rows > 0].tolist(), *(mean.tolist() for mean in means)))


def _bins(confidence: Floats) -> Ints:  # [rows] -> [rows]
    """Bins of equal mass (Nguyen & O'Connor 2015); rows of equal confidence share a bin."""
    less_confident = np.searchsorted(np.sort(confidence), confidence, side="left")
    return np.asarray(BINS * less_confident // len(confidence), np.int64)


def _squared_errors(truth: Ints, p: Floats) -> Floats:  # [rows], [rows, labels] -> [rows]
    """Each row's part of the Brier score: summed over labels; with two labels, of one of them."""
    rows, labels = p.shape
    error = p.copy()
    error[np.arange(rows), truth] -= 1
    summed: Floats = (error**2).sum(axis=1)
    return summed / 2 if labels == 2 else summed


def _one_hot(index: Ints, number: int) -> csr_array:  # [rows] -> [rows, number]
    ends = np.arange(len(index) + 1)
    return csr_array((np.ones(len(index)), index, ends), shape=(len(index), number))


def _ratio(a: Floats, b: Floats) -> Floats:
    """a / b; NaN where b is 0."""
    return np.asarray(np.divide(a, b, out=np.full(a.shape, np.nan), where=b > 0), np.float64)


def mean_defined(values: Floats) -> Floats:  # [..., labels] -> [...]
    """The mean over the labels with a value; NaN if no label has one."""
    defined = ~np.isnan(values)
    return _ratio(np.where(defined, values, 0).sum(axis=-1), defined.sum(axis=-1))
