"""Suspected rows: by a slow reading of the method, and on labels that were flipped on purpose."""

from __future__ import annotations

import numpy as np

from pipeline.evaluation.thresholds import mislabelled


def test_the_suspected_are_those_of_the_method_read_row_by_row() -> None:
    source = np.random.default_rng(0)
    truth = source.integers(0, 3, 90)
    p = source.dirichlet(np.ones(3), 90)
    means = [np.mean([p[row][k] for row in range(90) if truth[row] == k]) for k in range(3)]
    expected = {}
    for row in range(90):
        reached = [k for k in range(3) if p[row][k] >= means[k]]
        likely = max(reached, key=lambda k: p[row][k], default=truth[row])
        if likely != truth[row] != p[row].argmax():
            expected[row] = likely, p[row][truth[row]] - p[row][likely]
    found = mislabelled(truth, p)
    assert [each.row for each in found] == sorted(expected, key=lambda row: expected[row][1])
    for each in found:
        assert each.given == truth[each.row] and each.likely == expected[each.row][0]
        assert (each.p_given, each.p_likely) == (p[each.row, each.given], p[each.row, each.likely])


def test_flipped_labels_are_found_and_no_others() -> None:
    source = np.random.default_rng(1)
    truth = source.integers(0, 2, 400)
    first = np.clip(source.normal(np.where(truth == 0, 0.85, 0.15), 0.1), 0.01, 0.99)
    given = truth.copy()
    given[:20] = 1 - given[:20]
    found = [each.row for each in mislabelled(given, np.stack([first, 1 - first], axis=1))]
    assert set(found) <= set(range(20)) and len(found) >= 10  # half reach their label's mean


def test_answers_that_are_all_alike_suspect_nobody() -> None:
    assert mislabelled(np.array([0, 1, 0, 1]), np.full((4, 2), 0.5, np.float32)) == ()


def test_a_label_that_the_gold_never_says_is_never_the_likely_one() -> None:
    p = np.array([[0.2, 0.1, 0.7], [0.1, 0.2, 0.7]])
    assert mislabelled(np.array([0, 1]), p) == ()
