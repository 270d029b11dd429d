"""A task's change between two snapshots, from the texts by label before and after."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.integrity.diff import TaskChange


def change_of(
    task: str,
    labels: Sequence[str],
    before: NDArray[np.int64],
    after: NDArray[np.int64],
    flips: NDArray[np.int64],
    *,
    failing: int = 0,
) -> TaskChange:
    """A task with one label a document."""
    texts, same = int(flips.sum()), flips.diagonal()
    return TaskChange(
        task=task,
        labels=tuple(labels),
        fps=("f", "g"),
        before=before,
        after=after,
        answered=(int(before.sum()), int(after.sum())),
        newly_failing=failing,
        failing_ids=(),
        texts=texts,
        flipped=texts - int(same.sum()),
        gained=flips.sum(axis=0) - same,
        lost=flips.sum(axis=1) - same,
        flips=flips,
    )
