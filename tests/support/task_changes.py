"""A task's change between two snapshots, from the texts by label before and after."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.integrity.diff import Answers, Move, TaskChange, jensen_shannon, psi


def change_of(
    labels: Sequence[str],
    before: NDArray[np.int64],
    after: NDArray[np.int64],
    flips: NDArray[np.int64],
    *,
    failing: int = 0,
    questions: tuple[str, str] | None = None,
) -> TaskChange:
    """A task with one label a document; of one version, or reworded."""
    asked = questions or (None, None)
    versions = zip("fg" if questions else "ff", asked, strict=True)
    sides = [
        Answers(*version, int(counts.sum()), dict(zip(labels, counts.tolist(), strict=True)))
        for version, counts in zip(versions, (before, after), strict=True)
    ]
    cells = [(int(flips[x, y]), x, y) for x, y in np.argwhere(flips) if x != y]
    moves = [Move(labels[x], labels[y], texts) for texts, x, y in cells]
    return TaskChange(
        *sides,
        changed=() if questions is None else ("question",),
        psi=psi(before, after),
        jensen_shannon=jensen_shannon(before, after),
        texts=int(flips.sum()),
        flipped=sum(move.texts for move in moves),
        moves=tuple(moves),
        newly_failing=failing,
        failing_ids=(),
    )
