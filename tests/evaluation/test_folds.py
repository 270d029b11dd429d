"""Held-out parts: each row once, no text on both sides, labels spread alike."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.evaluation.folds import folds, random_split

SOURCE = np.random.default_rng(0)
TRUTH = (SOURCE.random(500) < 0.2).astype(np.int64)
GROUPS = np.arange(500)
GROUPS[100:110] = 7  # one text, eleven times
TRUTH[100:110] = TRUTH[7]


def test_every_row_is_held_out_once_and_no_group_is_on_both_sides() -> None:
    splits = folds(TRUTH, GROUPS, number=5, seed=1)
    assert sorted(np.concatenate([s.held_out for s in splits])) == list(range(500))
    for split in splits:
        assert sorted([*split.fitted, *split.held_out]) == list(range(500))
        assert not set(GROUPS[split.fitted]) & set(GROUPS[split.held_out])


def test_folds_have_their_share_of_the_rare_label() -> None:
    splits = folds(TRUTH, GROUPS, number=5, seed=1)
    rare = [TRUTH[split.held_out].sum() for split in splits]
    assert max(rare) - min(rare) <= 11, rare  # the group of eleven may be rare


def test_the_seed_decides() -> None:
    first, again, other = (folds(TRUTH, GROUPS, number=5, seed=s)[0].held_out for s in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


@pytest.mark.parametrize("fitted", [20, 300])
def test_a_random_split_has_the_rows_and_the_shares_it_should(fitted: int) -> None:
    split = random_split(TRUTH, GROUPS, fitted=fitted, held_out=100, seed=3)
    assert len(split.fitted) == fitted and 100 <= len(split.held_out) <= 111
    assert not set(GROUPS[split.fitted]) & set(GROUPS[split.held_out])
    assert TRUTH[split.held_out].mean() == pytest.approx(TRUTH.mean(), abs=0.06)
    assert TRUTH[split.fitted].sum() >= 1
