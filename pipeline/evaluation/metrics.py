"""Metrics of probabilities against gold labels, with intervals. Entry point: `score`.

`task_metrics` computes each metric once, by scikit-learn. `resampled_metrics` computes the same
metrics for many bootstrap resamples at once. A resample is a row of `counts`: how often each row
was drawn. scikit-learn takes one resample at a time: 1,000 resamples of 1,000 rows take it 6 s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.metrics import (
    average_precision_score,
    confusion_matrix,
    precision_recall_fscore_support,
    roc_auc_score,
)

from pipeline.evaluation.intervals import (
    Figure,
    auroc_interval,
    effective_rows,
    error_figure,
    interval,
    number_or_none,
    wilson,
)
from pipeline.evaluation.ordinal import ordinal_figures
from pipeline.evaluation.resampling import Sampling, draws
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
_MEANS_OF_LABELS = ("f1", "auroc", "ap")
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
    intervals: Mapping[str, tuple[float, float]]  # 95 %, of precision and recall


@dataclass(frozen=True, slots=True)
class Scores:
    """How good a task's answers are."""

    rows: int
    # HEADLINES, and ORDINAL_HEADLINES of a score; f1 is macro, auroc and ap one against the rest
    headlines: Mapping[str, Figure]
    labels: tuple[LabelScore, ...]
    # Rows by gold label, by predicted label; of a sample the documents that they represent.
    confusion: tuple[tuple[int, ...], ...]
    reliability: tuple[Bin, ...]
    resamples: int


def score(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    labels: Sequence[str],
    *,
    values: Sequence[float] = (),
    resamples: int = RESAMPLES,
    sampling: Sampling | None = None,
) -> Scores:
    """The scores of at least one row. The same rows give the same intervals.

    Intervals of accuracy, precision and recall are Wilson's, that of AUROC of two labels is
    Newcombe's, and others are from a bootstrap. Above RANKED_LABELS labels `auroc` and `ap` have no
    interval: both ends are None. With `values`, the numbers of a score's labels, the headlines of a
    score are among them. With `sampling`, metrics and intervals are those of the corpus.
    """
    rows, label_count = p.shape
    assert rows and label_count == len(labels) >= 2, (rows, label_count, labels)
    weights = np.ones(rows) if sampling is None else sampling.weights
    by_label = label_metrics(truth, p, weights)
    of_task = task_metrics(truth, p, by_label, weights)
    resampled = _resampled(truth, p, resamples, sampling)
    predicted = p.argmax(axis=1)
    confusion = confusion_matrix(truth, predicted, labels=range(label_count), sample_weight=weights)
    of_labels = (by_label[name].tolist() for name in LABEL_METRICS)
    # — a mean over labels is as uncertain as the rarest of them
    rarest = min(effective_rows(weights[truth == label]) for label in np.unique(truth))
    whole = effective_rows(weights)
    headlines = {
        name: interval(
            of_task[name],
            resampled[name],
            rows=whole,
            rarest=rarest if name in _MEANS_OF_LABELS else whole,
        )
        for name in HEADLINES
        if name != "ece"
    }
    bins = _reliability(*confidence_and_hits(truth, p), weights)
    headlines["ece"] = error_figure(bins.shares, bins.confidence, bins.accuracy, bins.effective)
    headlines["accuracy"] = Figure(of_task["accuracy"], *wilson(of_task["accuracy"], whole))
    if label_count == 2 and headlines["auroc"].value is not None:
        sides = (effective_rows(weights[truth == label]) for label in (0, 1))
        headlines["auroc"] = Figure(of_task["auroc"], *auroc_interval(of_task["auroc"], *sides))
    if values:
        headlines |= ordinal_figures(truth, p, values, resamples=resamples, sampling=sampling)
    return Scores(
        rows=rows,
        headlines=headlines,
        labels=tuple(
            _label_score(label, number, figures, truth, predicted, weights)
            for number, (label, *figures) in enumerate(zip(labels, *of_labels, strict=True))
        ),
        confusion=tuple(map(tuple, np.rint(confusion).astype(int).tolist())),
        reliability=tuple(
            map(Bin, bins.rows.tolist(), bins.confidence.tolist(), bins.accuracy.tolist())
        ),
        resamples=resamples,
    )


def _label_score(
    label: str,
    number: int,
    figures: Sequence[float],  # LABEL_METRICS
    truth: Ints,
    predicted: Ints,
    weights: Floats,
) -> LabelScore:
    """The score of the label with this number."""
    is_gold, is_predicted = truth == number, predicted == number
    precision, recall, f1, auroc, ap = map(number_or_none, figures)
    shares = (("precision", precision, is_predicted), ("recall", recall, is_gold))
    intervals = {
        name: wilson(share, effective_rows(weights[of]))
        for name, share, of in shares
        if share is not None
    }
    counts = int(is_gold.sum()), int(is_predicted.sum())
    return LabelScore(label, *counts, precision, recall, f1, auroc, ap, intervals)


def _resampled(
    truth: Ints, p: Floats, resamples: int, sampling: Sampling | None
) -> dict[str, Floats]:
    """[resamples] of each headline: samples of the same size, drawn with replacement."""
    rows, labels = p.shape
    source = np.random.default_rng(_SEED)
    at_once = max(1, _BATCH_COUNTS // max(rows, labels))
    rank = labels <= RANKED_LABELS
    batches = []
    for start in range(0, resamples, at_once):
        number = min(at_once, resamples - start)
        counts = draws(source, number, rows, sampling)
        batches.append(resampled_metrics(truth, p, counts, rank=rank))
    empty = np.zeros(0)
    names = (name for name in HEADLINES if name != "ece")
    return {name: np.concatenate([empty, *(b[name] for b in batches)]) for name in names}


def label_metrics(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    weights: Floats | None = None,  # [rows]; default: all equal
) -> dict[str, Floats]:  # [labels] each
    """LABEL_METRICS of every label against all others; NaN where one is undefined.

    Precision is undefined for a label that is never predicted, recall for a label without a gold
    row, F1 for a label with neither. A ranking needs a row with the label and one without.
    """
    rows, labels = p.shape
    precision, recall, f1, _ = precision_recall_fscore_support(
        truth,
        p.argmax(axis=1),
        labels=range(labels),
        zero_division=np.nan,
        sample_weight=weights,
    )
    auroc, ap = np.full((2, labels), np.nan)
    for label in np.unique(truth):
        positive = truth == label
        ap[label] = average_precision_score(positive, p[:, label], sample_weight=weights)
        if positive.sum() < rows:
            auroc[label] = roc_auc_score(positive, p[:, label], sample_weight=weights)
    return {"precision": precision, "recall": recall, "f1": f1, "auroc": auroc, "ap": ap}


def task_metrics(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    by_label: Mapping[str, Floats] | None = None,  # if already computed
    weights: Floats | None = None,  # [rows]; default: all equal
) -> dict[str, float]:
    """The metrics of a whole task; NaN where a metric is undefined.

    F1, AUROC and average precision are means over the labels for which they are defined. With two
    labels, AUROC and average precision are those of the first label.
    """
    weights = np.ones(len(p)) if weights is None else weights
    of_labels = by_label or label_metrics(truth, p, weights)
    ranked = slice(1 if p.shape[1] == 2 else None)
    confidence, hits = confidence_and_hits(truth, p)
    bins = _reliability(confidence, hits, weights)
    return {
        "accuracy": float(np.average(hits, weights=weights)),
        "f1": float(mean_defined(of_labels["f1"])),
        "auroc": float(mean_defined(of_labels["auroc"][ranked])),
        "ap": float(mean_defined(of_labels["ap"][ranked])),
        "brier": float(np.average(_squared_errors(truth, p), weights=weights)),
        "ece": float(
            np.abs(bins.accuracy - bins.confidence) @ bins.shares
        ),  # of few rows it is too high
    }


def resampled_metrics(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    counts: Floats,  # [resamples, rows]: how often, or with which weight, a row is in a resample
    *,
    rank: bool = True,
) -> dict[str, Floats]:  # [resamples] each
    """The metrics of `task_metrics`, but the calibration error, for every resample.

    Without `rank`, AUROC and average precision are NaN.
    """
    _, labels = p.shape
    total = counts.sum(axis=1)
    _, hits = confidence_and_hits(truth, p)
    gold, predicted = _one_hot(truth, labels), _one_hot(p.argmax(axis=1), labels)
    f1 = ratio(
        2 * (counts @ gold.multiply(hits[:, None]).tocsr()), counts @ gold + counts @ predicted
    )
    auroc = ap = np.full((len(counts), 1), np.nan)
    if rank:
        pairs = [
            ranked(truth == label, p[:, label], counts) for label in range(labels - (labels == 2))
        ]
        auroc, ap = (np.stack(column, axis=1) for column in zip(*pairs, strict=True))
    return {
        "accuracy": counts @ hits / total,
        "f1": mean_defined(f1),
        "auroc": mean_defined(auroc),
        "ap": mean_defined(ap),
        "brier": counts @ _squared_errors(truth, p) / total,
    }


def ranked(
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
    precision = all_hits / np.where(all_hits + all_misses > 0, all_hits + all_misses, 1)
    return (
        ratio((hits * below).sum(axis=1), positives * negatives),
        ratio((hits * precision).sum(axis=1), positives),
    )


def confidence_and_hits(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
) -> tuple[Floats, Bools]:  # [rows] each
    """The predicted label's probability, and whether that label is the gold label."""
    rows, _ = p.shape
    predicted = p.argmax(axis=1)
    return p[np.arange(rows), predicted], predicted == truth


class _Bins(NamedTuple):
    """The bins of the calibration error that are not empty, the least confident first."""

    rows: Ints  # [bins]
    shares: Floats  # [bins]: of all rows, by weight
    confidence: Floats  # [bins]: mean
    accuracy: Floats  # [bins]
    effective: Floats  # [bins]: rows


def _reliability(
    confidence: Floats,  # [rows]
    hits: Bools,  # [rows]
    weights: Floats,  # [rows]
) -> _Bins:
    """Bins of equal mass (Nguyen & O'Connor 2015); rows of equal confidence share a bin.

    scikit-learn's `calibration_curve` does not return how many rows a bin has.
    """
    order = np.argsort(confidence, kind="stable")
    rising, mass = confidence[order], weights[order]
    first = np.searchsorted(rising, rising, side="left")  # of the rows of equal confidence
    less_confident = np.pad(mass.cumsum(), (1, 0))[first]
    # — rounding may leave the last rows above all
    bins = np.minimum((BINS * less_confident // mass.sum()).astype(np.int64), BINS - 1)
    rows = np.bincount(bins)
    sums = (np.bincount(bins, mass * each) for each in (1, rising, hits[order], mass))
    total, confident, right, squares = (each[rows > 0] for each in sums)
    means = confident / total, right / total
    return _Bins(rows[rows > 0], total / total.sum(), *means, total**2 / squares)


def _squared_errors(truth: Ints, p: Floats) -> Floats:  # [rows], [rows, labels] -> [rows]
    """Each row's part of the Brier score, from 0 to 1: half of the sum over labels.

    Of two labels, that is the error of either one.
    """
    rows, _ = p.shape
    error = p.copy()
    error[np.arange(rows), truth] -= 1
    return np.asarray((error**2).sum(axis=1) / 2, np.float64)


def _one_hot(index: Ints, number: int) -> csr_array:  # [rows] -> [rows, number]
    ends = np.arange(len(index) + 1)
    return csr_array((np.ones(len(index)), index, ends), shape=(len(index), number))


def ratio(a: Floats, b: Floats) -> Floats:
    """a / b; NaN where b is 0."""
    return np.asarray(np.divide(a, b, out=np.full(a.shape, np.nan), where=b > 0), np.float64)


def mean_defined(values: Floats) -> Floats:  # [..., labels] -> [...]
    """The mean over the labels with a value; NaN if no label has one."""
    defined = ~np.isnan(values)
    return ratio(np.where(defined, values, 0).sum(axis=-1), defined.sum(axis=-1))
