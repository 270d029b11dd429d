"""False positives by subgroup: a planted bias is found, and chance is not."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import fisher_exact

from pipeline.evaluation.subgroups import false_positive_rates
from pipeline.verbs.corpus_report import _word


def test_a_planted_bias_is_flagged_and_the_numbers_are_those_of_a_count() -> None:
    source = np.random.default_rng(0)
    truth = source.random(2_000) < 0.3
    biased, fair = source.random(2_000) < 0.2, source.random(2_000) < 0.2
    predicted = source.random(2_000) < np.where(truth, 0.9, np.where(biased, 0.3, 0.1))
    first, second = false_positive_rates(truth, predicted, {"fair": fair, "biased": biased})
    assert (first.name, first.flagged, second.flagged) == ("biased", True, False)
    for each, inside in ((first, biased), (second, fair)):
        own, others = predicted[~truth & inside], predicted[~truth & ~inside]
        assert (each.negatives, each.false_positives) == (len(own), own.sum())
        assert each.rate == pytest.approx(own.mean())
        assert each.rate_of_others == pytest.approx(others.mean())
        assert each.low < each.rate < each.high
    # — of two p-values, Benjamini and Hochberg double the smaller one
    table = [[first.false_positives, first.negatives - first.false_positives]]
    others = predicted[~truth & ~biased]
    table.append([int(others.sum()), int((~others).sum())])
    assert first.p_value == pytest.approx(2 * fisher_exact(table).pvalue)


def test_without_a_difference_few_subgroups_are_flagged() -> None:
    """With corrected p-values, all flags are false in at most 5 % of corpora."""
    flagged = 0
    for seed in range(200):
        source = np.random.default_rng(seed)
        truth, predicted = source.random((2, 300)) < 0.3
        members = {str(n): source.random(300) < 0.3 for n in range(5)}
        flagged += any(each.flagged for each in false_positive_rates(truth, predicted, members))
    assert flagged <= 10


def test_a_subgroup_without_negatives_has_no_rate_and_none_is_nothing() -> None:
    truth, predicted = np.array([True, True, False]), np.array([True, False, True])
    members = {"positive": truth, "all": np.ones(3, np.bool_)}
    whole, positive = false_positive_rates(truth, predicted, members)
    assert (whole.name, whole.negatives, whole.rate, whole.rate_of_others) == ("all", 1, 1.0, None)
    assert (positive.name, positive.negatives, positive.rate) == ("positive", 0, None)
    assert not whole.flagged and not positive.flagged
    assert false_positive_rates(truth, predicted, {}) == ()


@pytest.mark.parametrize(
    ("term", "text", "is_member"),
    [
        ("gay", "Gays", False),
        ("gay", "a GAY man", True),
        ("C++", "in C++11", True),
        ("C++", "BC++", False),
        ("@user", "hi,@user.", True),
        ("女性", "日本女性が", True),
        ("औरत", "औरतें", True),
    ],
)
def test_a_term_is_a_word_where_the_script_has_spaces(
    term: str, text: str, is_member: bool
) -> None:
    assert bool(_word(term).search(text)) == is_member


@pytest.mark.parametrize("drawn", [40, 200, 1_000])
def test_rows_of_a_sample_count_as_the_documents_that_they_represent(drawn: int) -> None:
    """Of an audit, half of the rows are texts that the rule drops; nearly none of the corpus is."""
    source = np.random.default_rng(drawn)
    size, inside = 100_000, source.random(100_000) < 0.3
    predicted = source.random(size) < np.where(inside, 0.02, 0.01)
    truth = np.zeros(size, np.bool_)
    sides = [np.flatnonzero(predicted), np.flatnonzero(~predicted)]
    rows = np.concatenate([source.choice(side, drawn, replace=False) for side in sides])
    weights = np.repeat([len(side) / drawn for side in sides], drawn)
    [rate] = false_positive_rates(truth[rows], predicted[rows], {"x": inside[rows]}, weights)
    assert rate.rate == pytest.approx(predicted[inside].mean(), rel=0.5)
    assert rate.rate_of_others == pytest.approx(predicted[~inside].mean(), rel=0.5)
    assert rate.low < predicted[inside].mean() < rate.high < 0.25
    [unweighted] = false_positive_rates(truth[rows], predicted[rows], {"x": inside[rows]})
    assert unweighted.rate > 0.4
