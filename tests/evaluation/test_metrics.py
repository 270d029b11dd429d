"""Metrics of the sample and of resamples equal scikit-learn's on rows that are written out."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn import metrics as oracle

from pipeline.evaluation import resampling
from pipeline.evaluation.metrics import HEADLINES, resampled_metrics, score
from pipeline.evaluation.resampling import bootstrap

Sample = tuple[NDArray[np.int64], NDArray[np.float64]]


def sample(labels: int, rows: int = 120, seed: int = 0) -> Sample:
    """Rounded to tenths, so that many scores are equal; better than chance."""
    source = np.random.default_rng(seed)
    truth = source.integers(0, labels, rows)
    p = source.dirichlet(np.ones(labels), rows) + 0.5 * np.eye(labels)[truth]
    p = np.round(p / p.sum(axis=1, keepdims=True), 1) + 0.01
    return truth, p / p.sum(axis=1, keepdims=True)


def expected(truth: NDArray[np.int64], p: NDArray[np.float64]) -> dict[str, float]:
    """The same metrics by scikit-learn alone."""
    labels = p.shape[1]
    predicted = p.argmax(axis=1)
    ranked = range(1 if labels == 2 else labels)
    one_hot = np.eye(labels)[truth]
    return {
        "accuracy": oracle.accuracy_score(truth, predicted),
        "f1": oracle.f1_score(truth, predicted, average="macro", zero_division=0),
        "auroc": float(np.mean([oracle.roc_auc_score(truth == k, p[:, k]) for k in ranked])),
        "ap": float(np.mean([oracle.average_precision_score(truth == k, p[:, k]) for k in ranked])),
        "brier": oracle.brier_score_loss(truth == 0, p[:, 0])
        if labels == 2
        else float(((p - one_hot) ** 2).sum(axis=1).mean() / 2),
    }


@pytest.mark.parametrize("labels", [2, 3, 7])
def test_a_sample_has_the_metrics_of_scikit_learn(labels: int) -> None:
    truth, p = sample(labels)
    headlines = score(truth, p, list("abcdefg")[:labels], resamples=0).headlines
    assert headlines.keys() == {*HEADLINES}
    for name, value in expected(truth, p).items():
        assert headlines[name].value == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize("labels", [2, 4])
def test_a_resample_has_the_metrics_of_its_rows_written_out(labels: int) -> None:
    truth, p = sample(labels)
    rows = np.random.default_rng(1).integers(0, len(truth), (7, len(truth)))
    rows[6, truth[rows[6]] == 0] = truth.argmax()  # the last has no row of the first label
    counts = np.stack([np.bincount(own, minlength=len(truth)) for own in rows]).astype(float)
    resampled = resampled_metrics(truth, p, counts)
    for number, own in enumerate(rows[:6]):
        for name, value in expected(truth[own], p[own]).items():
            assert resampled[name][number] == pytest.approx(value, abs=1e-12), name
    assert np.isnan(resampled["auroc"][6]) == (labels == 2)


def test_each_label_has_the_metrics_of_scikit_learn() -> None:
    truth, p = sample(4)
    truth[truth == 3] = 0  # the last label has no gold row
    scores = score(truth, p, list("abcd"), resamples=0)
    p_r_f = oracle.precision_recall_fscore_support(
        truth, p.argmax(1), labels=range(4), zero_division=0
    )
    by_label = zip(*p_r_f, strict=True)
    for index, (each, (precision, recall, f1, support)) in enumerate(
        zip(scores.labels[:3], by_label, strict=False)
    ):
        assert (each.precision, each.recall, each.f1) == pytest.approx((precision, recall, f1))
        assert each.support == support
        assert each.auroc == pytest.approx(oracle.roc_auc_score(truth == index, p[:, index]))
    last = scores.labels[3]
    assert last.support == 0 and last.recall is None and last.auroc is None and last.ap is None
    assert last.predicted > 0 and last.precision == 0 and last.f1 == 0
    assert scores.confusion == tuple(
        map(tuple, oracle.confusion_matrix(truth, p.argmax(1), labels=range(4)).tolist())
    )


def test_an_undefined_metric_is_none() -> None:
    """One gold label only: nothing to rank."""
    scores = score(np.zeros(5, np.int64), np.tile([0.7, 0.3], (5, 1)), ["a", "b"], resamples=50)
    assert scores.headlines["auroc"].value is None and scores.headlines["auroc"].low is None
    assert scores.headlines["accuracy"].value == 1 and scores.headlines["f1"].value == 1
    b = scores.labels[1]
    assert (b.support, b.predicted, b.precision, b.f1) == (0, 0, None, None)


def test_a_95_percent_interval_contains_the_truth_in_95_percent_of_samples() -> None:
    """Over 150 samples of known accuracy 0.8, a valid 95 % interval misses about 8."""
    source = np.random.default_rng(3)
    missed = 0
    for _ in range(150):
        truth = source.integers(0, 2, 150)
        predicted = np.where(source.random(150) < 0.8, truth, 1 - truth)
        p = np.where(np.eye(2)[predicted] == 1, 0.8, 0.2)
        figure = score(truth, p, ["a", "b"], resamples=1).headlines["accuracy"]
        assert figure.low is not None and figure.high is not None
        missed += not figure.low <= 0.8 <= figure.high
    assert 2 <= missed <= 18


def test_batches_do_not_change_the_number_and_spread_of_resamples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    truth, p = sample(2)
    measure = partial(resampled_metrics, truth, p)
    at_once = bootstrap(measure, len(truth), resamples=600)
    monkeypatch.setattr(resampling, "_BATCH_COUNTS", 7 * len(truth))
    in_batches = bootstrap(measure, len(truth), resamples=600)
    assert in_batches.keys() == at_once.keys() == {*HEADLINES}
    for name in at_once:
        assert in_batches[name].shape == at_once[name].shape == (601,)
        assert in_batches[name][0] == at_once[name][0], "the sample itself"
        assert in_batches[name].mean() == pytest.approx(at_once[name].mean(), abs=0.01)
        assert in_batches[name].std() == pytest.approx(at_once[name].std(), rel=0.15)


def test_of_many_labels_the_ranks_have_no_interval() -> None:
    truth, p = sample(150, rows=600)
    truth[::3] = truth[1::3]  # a third is wrong
    scores = score(truth, p, [f"label-{index}" for index in range(150)], resamples=20)
    f1 = oracle.f1_score(truth, p.argmax(1), labels=np.union1d(truth, p.argmax(1)), average="macro")
    accuracy, macro = scores.headlines["accuracy"], scores.headlines["f1"]
    assert accuracy.value == pytest.approx(oracle.accuracy_score(truth, p.argmax(1)))
    assert macro.value == pytest.approx(f1)
    assert accuracy.low is not None and accuracy.low < accuracy.value
    for name in ("auroc", "ap"):
        figure = scores.headlines[name]
        assert figure.value is not None and figure.low is None and figure.high is None
    assert sum(map(sum, scores.confusion)) == 600


@pytest.mark.parametrize("labels", [2, 3, 20])
def test_the_brier_score_is_from_0_to_1(labels: int) -> None:
    truth = np.arange(40) % labels
    for p, value in ((np.eye(labels)[truth], 0.0), (np.eye(labels)[(truth + 1) % labels], 1.0)):
        figure = score(truth, p, [str(n) for n in range(labels)], resamples=20).headlines["brier"]
        assert figure.value == value and figure.low is not None and figure.high is not None
        assert 0 <= figure.low <= value <= figure.high <= 1
