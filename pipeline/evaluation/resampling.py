"""Rows that are drawn or held out: resamples of the bootstrap, and folds of cross-validation.

Entry points: `draws` and `folds`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def draws(source: np.random.Generator, resamples: int, rows: int) -> Floats:
    """[resamples, rows]: how often each row was drawn."""
    drawn = source.integers(0, rows, (resamples, rows)) + rows * np.arange(resamples)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=resamples * rows)
    return counts.reshape(resamples, rows).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Split:
    """Rows to fit to and rows to hold out, in rising order."""

    fitted: Ints
    held_out: Ints


def folds(truth: Ints, groups: Ints, *, number: int, seed: int) -> list[Split]:
    """Stratified folds of whole groups, which hold out every row once.

    A label may have fewer groups than there are folds, which scikit-learn's folds do not allow.
    """
    fold = np.empty(len(truth), np.int64)
    for place, rows in enumerate(_shuffled_groups(truth, groups, seed)):
        fold[rows] = place % number
    splits = [Split(np.flatnonzero(fold != n), np.flatnonzero(fold == n)) for n in range(number)]
    return [split for split in splits if len(split.fitted) and len(split.held_out)]


def _shuffled_groups(truth: Ints, groups: Ints, seed: int) -> list[Ints]:
    """The rows of each group, in random order, sorted by the label of the group's first row."""
    _, first, group_of = np.unique(groups, return_index=True, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(first))
    order = order[np.argsort(truth[first][order], kind="stable")]
    rows = np.split(np.argsort(group_of, kind="stable"), np.cumsum(np.bincount(group_of))[:-1])
    return [rows[group] for group in order]
