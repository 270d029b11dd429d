"""Metrics of probabilities against gold labels, with intervals.

Entry points: `score` for a task, `means_over_labels` for one of kind `multi`, and `paired` for two
answers to the same rows.
`resampled_metrics` computes metrics for many bootstrap resamples at once. A resample is a row of
`counts`: how often each row was drawn. scikit-learn takes one resample at a time: 1,000 resamples
of 1,000 rows take it 6 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from pipeline.evaluation.intervals import (
    Figure,
    auroc_interval,
    difference,
    interval,
    number_or_none,
    wilson,
)
from pipeline.evaluation.ordinal import ordinal_figures, ordinal_metrics
from pipeline.evaluation.resampling import RESAMPLES, Bools, Floats, Ints, bootstrap

HEADLINES = ("accuracy", "f1", "auroc", "ap", "brier")
MULTI_HEADLINES = ("macro_f1", "macro_auroc")
LABEL_METRICS = ("precision", "recall", "f1", "auroc", "ap")
# Ranking every label in every resample takes most of the time: above this number of labels, AUROC
# and average precision have no interval.
RANKED_LABELS = 100
_MEANS_OF_LABELS = ("f1", "auroc", "ap")


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
    pairs = label_count * truth + p.argmax(axis=1)
    confusion = np.bincount(pairs, minlength=label_count**2).reshape(label_count, label_count)
    ranks = {"auroc": np.full(label_count, np.nan), "ap": np.full(label_count, np.nan)}
    for label in np.unique(truth):
        of_label = ranked(truth == label, p[:, label], np.ones((1, rows)))
        ranks["auroc"][label], ranks["ap"][label] = (float(value[0]) for value in of_label)
    measured = bootstrap(
        measure_of(truth, p, values), rows, resamples=resamples, columns=label_count
    )
    return Scores(
        rows=rows,
        headlines={
            **_headlines(measured, ranks, confusion),
            **(ordinal_figures(measured, values, rows) if values else {}),
        },
        labels=tuple(_label_scores(labels, ranks, confusion)),
        confusion=tuple(map(tuple, confusion.tolist())),
        resamples=resamples,
    )


def _headlines(
    measured: Mapping[str, Floats],  # [1 + resamples] each
    ranks: Mapping[str, Floats],  # [labels] each
    confusion: Ints,  # [labels, labels]: rows by gold label, by predicted label
) -> dict[str, Figure]:
    """HEADLINES of a task.

    F1, AUROC and average precision are means over the labels for which they are defined. With two
    labels, AUROC and average precision are those of the first label.
    """
    support = confusion.sum(axis=1)
    rows, labels = int(support.sum()), len(support)
    # — a mean over labels is as uncertain as the rarest of them
    rarest = int(support[support > 0].min())
    headlines = {}
    for name in HEADLINES:
        value, others = float(measured[name][0]), measured[name][1:]
        if labels > RANKED_LABELS and name in ranks:
            value = float(mean_defined(ranks[name]))
        depends_on = rarest if name in _MEANS_OF_LABELS else rows
        headlines[name] = interval(value, others, rows=rows, rarest=depends_on)
    accuracy, auroc = headlines["accuracy"].value, headlines["auroc"].value
    assert accuracy is not None, rows
    headlines["accuracy"] = Figure(accuracy, *wilson(accuracy, rows))
    if labels == 2 and auroc is not None:
        headlines["auroc"] = Figure(auroc, *auroc_interval(auroc, *support.tolist()))
    return headlines


def _label_scores(
    labels: Sequence[str], ranks: Mapping[str, Floats], confusion: Ints
) -> Iterator[LabelScore]:
    """Every label against all others.

    Precision is undefined for a label that is never predicted, recall for a label without a gold
    row, F1 for a label with neither. A ranking needs a row with the label and one without.
    """
    hits, gold, predicted = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    shares = ratio(hits, predicted), ratio(hits, gold), ratio(2 * hits, gold + predicted)
    figures = zip(*(of.tolist() for of in (*shares, *ranks.values())), strict=True)
    counts = zip(labels, gold.tolist(), predicted.tolist(), strict=True)
    for (label, support, answers), own in zip(counts, figures, strict=True):
        precision, recall, f1, auroc, ap = map(number_or_none, own)
        pairs = (("precision", precision, answers), ("recall", recall, support))
        intervals = {name: wilson(share, of) for name, share, of in pairs if share is not None}
        yield LabelScore(label, support, answers, precision, recall, f1, auroc, ap, intervals)


def measure_of(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    values: Sequence[float],  # [labels] of a score; ()
) -> Callable[[Floats], dict[str, Floats]]:
    """The function that measures HEADLINES, and for a score ORDINAL_HEADLINES, of resamples."""

    def measure(counts: Floats) -> dict[str, Floats]:  # [resamples, rows] -> [resamples] each
        figures = resampled_metrics(truth, p, counts, rank=p.shape[1] <= RANKED_LABELS)
        return figures | (ordinal_metrics(truth, p, values, counts) if values else {})

    return measure


def resampled_metrics(
    truth: Ints,  # [rows]
    p: Floats,  # [rows, labels]
    counts: Floats,  # [resamples, rows]: how often a row is in a resample
    *,
    rank: bool = True,
) -> dict[str, Floats]:  # [resamples] each
    """HEADLINES of every resample; NaN where one is undefined.

    Without `rank`, AUROC and average precision are NaN.
    """
    _, labels = p.shape
    total = counts.sum(axis=1)
    answers = p.argmax(axis=1)
    hits, gold, predicted = answers == truth, _one_hot(truth, labels), _one_hot(answers, labels)
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


def ratio(a: Floats | Ints, b: Floats | Ints) -> Floats:
    """a / b; NaN where b is 0."""
    return np.asarray(np.divide(a, b, out=np.full(a.shape, np.nan), where=b > 0), np.float64)


def mean_defined(values: Floats) -> Floats:  # [..., labels] -> [...]
    """The mean over the labels with a value; NaN if no label has one."""
    defined = ~np.isnan(values)
    return ratio(np.where(defined, values, 0).sum(axis=-1), defined.sum(axis=-1))


@dataclass(frozen=True, slots=True)
class LabelRows:
    """The rows by which one label of a task of kind `multi` is judged."""

    rows: Ints  # [rows]: among those of the task, rising
    applies: Bools  # [rows]: by gold
    p: Floats  # [rows]: that the label applies; at .5 or more it is predicted


def means_over_labels(
    labels: Sequence[LabelRows],
    rows: int,  # of the task
    *,
    resamples: int = RESAMPLES,
) -> dict[str, Figure]:
    """MULTI_HEADLINES with 95 % intervals from a bootstrap of the rows.

    They are means of F1 and of AUROC over the labels for which these are defined. The same rows
    are drawn for all labels, because a document's labels depend on each other.
    """

    def measure(counts: Floats) -> dict[str, Floats]:
        f1, auroc = [], []
        for label in labels:
            own, predicted = counts[:, label.rows], label.p >= 0.5
            hits = own @ (label.applies & predicted)
            f1.append(ratio(2 * hits, own @ label.applies + own @ predicted))
            auroc.append(ranked(label.applies, label.p, own)[0])
        means = (mean_defined(np.stack(of_labels, axis=1)) for of_labels in (f1, auroc))
        return dict(zip(MULTI_HEADLINES, means, strict=True))

    # — a mean over labels is as uncertain as the rarest of them
    sides = [side.sum() for of in labels for side in (of.applies, ~of.applies) if side.any()]
    return {
        name: interval(float(drawn[0]), drawn[1:], rows=rows, rarest=int(min(sides)))
        for name, drawn in bootstrap(measure, rows, resamples=resamples).items()
    }


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
                number_or_none(drawn[0]),
                number_or_none(others[name][0]),
                difference(drawn, others[name], rarest),
            )
            for name, drawn in own.items()
        },
    )
