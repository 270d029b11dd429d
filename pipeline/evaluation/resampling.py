"""Rows that are drawn or held out: resamples of the bootstrap, and folds of cross-validation.

Entry points: `bootstrap` and `folds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


_SEED = 20_26
RESAMPLES = 1_000  # of a bootstrap
# Counts in one batch of resamples: a few arrays of 8 MB. Batches of four times this size took twice
# the time.
_BATCH_COUNTS = 1_000_000


def bootstrap(
    measure: Callable[[Floats], Mapping[str, Floats]],
    rows: int,
    *,
    resamples: int,
    columns: int = 1,
) -> dict[str, Floats]:  # [1 + resamples] each
    """Figures of the sample itself, and of samples of the same size, drawn with replacement.

    The same rows are drawn each time.

    Args:
        measure: The figures of [resamples, rows] counts: how often a row is in a resample.
        rows: Rows of the sample.
        resamples: Number of samples that are drawn.
        columns: Numbers of a row that `measure` holds for each resample, if more than `rows`.
    """
    source = np.random.default_rng(_SEED)
    at_once = max(1, _BATCH_COUNTS // max(rows, columns))
    batches = [measure(np.ones((1, rows)))]
    for start in range(0, resamples, at_once):
        batches.append(measure(draws(source, min(at_once, resamples - start), rows)))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


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
