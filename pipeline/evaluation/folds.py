"""Parts of the rows that are held out, so that nothing is tried on what it was fitted to.

Rows of one group, as those of one text, are never on both sides. Knows indices. Knows nothing of
what rows hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Split:
    """Rows to fit to, and rows to hold out, both rising."""

    fitted: Ints
    held_out: Ints


def folds(truth: Ints, groups: Ints, *, number: int, seed: int) -> list[Split]:
    """Splits whose held-out parts hold each row once, with each label's share in all alike."""
    fold = np.empty(len(truth), np.int64)
    for place, rows in enumerate(_dealt(truth, groups, seed)):
        fold[rows] = place % number
    splits = [Split(np.flatnonzero(fold != n), np.flatnonzero(fold == n)) for n in range(number)]
    return [split for split in splits if len(split.fitted) and len(split.held_out)]


def random_split(truth: Ints, groups: Ints, *, fitted: int, held_out: int, seed: int) -> Split:
    """About so many rows to fit to and to hold out, with each label's share in both alike."""
    order = _spread(_dealt(truth, groups, seed), truth)
    rows = np.concatenate([np.zeros(0, np.int64), *order])
    ends = np.cumsum([len(group) for group in order])
    first = int(ends[min(int(np.searchsorted(ends, held_out)), len(ends) - 1)])
    return Split(np.sort(rows[first : first + fitted]), np.sort(rows[:first]))


def _dealt(truth: Ints, groups: Ints, seed: int) -> list[Ints]:
    """The rows of each group; groups of one label follow each other, in random order."""
    _, first, group_of = np.unique(groups, return_index=True, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(first))
    order = order[np.argsort(truth[first][order], kind="stable")]
    by_group = np.argsort(group_of, kind="stable")
    rows = np.split(by_group, np.cumsum(np.bincount(group_of))[:-1])
    return [rows[group] for group in order]


def _spread(dealt: list[Ints], truth: Ints) -> list[Ints]:
    """The same groups, every label's spread evenly over the whole order."""
    labels = np.array([truth[rows[0]] for rows in dealt])
    place = np.empty(len(dealt))
    for label in np.unique(labels):
        of_label = np.flatnonzero(labels == label)
        place[of_label] = (np.arange(len(of_label)) + 0.5) / len(of_label)
    return [dealt[i] for i in np.argsort(place, kind="stable")]
