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
    error_figure,
    interval,
    number_or_none,
    wilson,
)
from pipeline.evaluation.ordinal import ordinal_figures
from pipeline.evaluation.resampling import draws
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
    confusion: tuple[tuple[int, ...], ...]  # rows by gold label, by predicted label
    reliability: tuple[Bin, ...]
    resamples: int


def score(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    labels: Sequence[str],
    *,
    values: Sequence[float] = (),
    resamples: int = RESAMPLES,
) -> Scores:
    """The scores of at least one row. The same rows give the same intervals.

    Intervals of accuracy, precision and recall are Wilson's, that of AUROC of two labels is
    Newcombe's, and others are from a bootstrap. Above RANKED_LABELS labels `auroc` and `ap` have no
    interval: both ends are None. With `values`, the numbers of a score's labels, the headlines of a
    score are among them.
    """
    rows, label_count = p.shape
    assert rows and label_count == len(labels) >= 2, (rows, label_count, labels)
    by_label = label_metrics(truth, p)
    of_task = task_metrics(truth, p, by_label)
    resampled = _resampled(truth, p, resamples)
    predicted = p.argmax(axis=1)
    confusion = confusion_matrix(truth, predicted, labels=range(label_count))
    of_labels = (by_label[name].tolist() for name in LABEL_METRICS)
    # — a mean over labels is as uncertain as the rarest of them
    support = np.bincount(truth, minlength=label_count)
    rarest = int(support[support > 0].min())
    headlines = {
        name: interval(
            of_task[name],
            resampled[name],
            rows=rows,
            rarest=rarest if name in _MEANS_OF_LABELS else rows,
        )
        for name in HEADLINES
        if name != "ece"
    }
    bins = _reliability(*confidence_and_hits(truth, p))
    headlines["ece"] = error_figure(bins.rows, bins.confidence, bins.accuracy)
    headlines["accuracy"] = Figure(of_task["accuracy"], *wilson(of_task["accuracy"], rows))
    if label_count == 2 and headlines["auroc"].value is not None:
        ends = auroc_interval(of_task["auroc"], *support.tolist())
        headlines["auroc"] = Figure(of_task["auroc"], *ends)
    if values:
        headlines |= ordinal_figures(truth, p, values, resamples=resamples)
    return Scores(
        rows=rows,
        headlines=headlines,
        labels=tuple(
            _label_score(label, number, figures, truth, predicted)
            for number, (label, *figures) in enumerate(zip(labels, *of_labels, strict=True))
        ),
        confusion=tuple(map(tuple, confusion.tolist())),
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
) -> LabelScore:
    """The score of the label with this number."""
    is_gold, is_predicted = truth == number, predicted == number
    precision, recall, f1, auroc, ap = map(number_or_none, figures)
    shares = (("precision", precision, is_predicted), ("recall", recall, is_gold))
    intervals = {
        name: wilson(share, int(of.sum())) for name, share, of in shares if share is not None
    }
    counts = int(is_gold.sum()), int(is_predicted.sum())
    return LabelScore(label, *counts, precision, recall, f1, auroc, ap, intervals)


def _resampled(truth: Ints, p: Floats, resamples: int) -> dict[str, Floats]:
    """[resamples] of each headline: samples of the same size, drawn with replacement."""
    rows, labels = p.shape
    source = np.random.default_rng(_SEED)
    at_once = max(1, _BATCH_COUNTS // max(rows, labels))
    rank = labels <= RANKED_LABELS
    batches = []
    for start in range(0, resamples, at_once):
        number = min(at_once, resamples - start)
        counts = draws(source, number, rows)
        batches.append(resampled_metrics(truth, p, counts, rank=rank))
    empty = np.zeros(0)
    names = (name for name in HEADLINES if name != "ece")
    return {name: np.concatenate([empty, *(b[name] for b in batches)]) for name in names}


def label_metrics(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
) -> dict[str, Floats]:  # [labels] each
    """LABEL_METRICS of every label against all others; NaN where one is undefined.

    Precision is undefined for a label that is never predicted, recall for a label without a gold
    row, F1 for a label with neither. A ranking needs a row with the label and one without.
    """
    rows, labels = p.shape
    precision, recall, f1, _ = precision_recall_fscore_support(
        truth, p.argmax(axis=1), labels=range(labels), zero_division=np.nan
    )
    auroc, ap = np.full((2, labels), np.nan)
    for label in np.unique(truth):
        positive = truth == label
        ap[label] = average_precision_score(positive, p[:, label])
        if positive.sum() < rows:
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
    of_labels = by_label or label_metrics(truth, p)
    ranked = slice(1 if p.shape[1] == 2 else None)
    confidence, hits = confidence_and_hits(truth, p)
    bins = _reliability(confidence, hits)
    return {
        "accuracy": float(hits.mean()),
        "f1": float(mean_defined(of_labels["f1"])),
        "auroc": float(mean_defined(of_labels["auroc"][ranked])),
        "ap": float(mean_defined(of_labels["ap"][ranked])),
        "brier": float(_squared_errors(truth, p).mean()),
        "ece": float(
            np.abs(bins.accuracy - bins.confidence) @ bins.rows / len(p)
        ),  # of few rows it is too high
    }


def resampled_metrics(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    counts: Floats,  # [resamples, rows]: how often a row is in a resample
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
    confidence: Floats  # [bins]: mean
    accuracy: Floats  # [bins]


def _reliability(
    confidence: Floats,  # [rows]
    hits: Bools,  # [rows]
) -> _Bins:
    """Bins of equal mass (Nguyen & O'Connor 2015); rows of equal confidence share a bin.

    scikit-learn's `calibration_curve` does not return how many rows a bin has.
    """
    order = np.argsort(confidence, kind="stable")
    rising = confidence[order]
    first = np.searchsorted(rising, rising, side="left")  # of the rows of equal confidence
    bins = BINS * first // len(rising)
    rows = np.bincount(bins)
    sums = (np.bincount(bins, each)[rows > 0] for each in (rising, hits[order]))
    own = rows[rows > 0]
    return _Bins(own, *(each / own for each in sums))


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
