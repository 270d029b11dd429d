"""One task's answers, a row a document: of every label, or of the likeliest of very many.

Knows log-probabilities and the levels of labels' names. Knows nothing of models or of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.inference.pieces import combine
from pipeline.spec import TaskSpec

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TaskAnswers:
    """What is kept of a task's answers; NaN where a row has none."""

    task: TaskSpec
    log_probs: Floats  # [rows, kept]: of every label in order, or of the likeliest in falling order
    log_mass: Floats  # [rows]: of all labels that were scored, together
    labels: NDArray[np.int32] | None  # [rows, kept]: which those are; None: every label
    levels: Floats | None  # [rows, levels]: log-probability of the best path's; NaN behind its end
    level_ids: NDArray[np.int32] | None  # [labels, levels]: what lies below the same has the same

    @classmethod
    def of(cls, task: TaskSpec, rows: int) -> TaskAnswers:
        """No answers yet; in memory that `top_k` bounds, however many the labels are."""
        many = task.top_k is not None
        # — a margin needs two, even where one is asked for
        kept = min(max(task.top_k or 0, 2), len(task.labels)) if many else len(task.labels)
        ids = _level_ids(list(task.labels), task.separator) if task.separator else None
        return cls(
            task,
            log_probs=np.full((rows, kept), np.nan, np.float32),
            log_mass=np.full(rows, np.nan, np.float32),
            labels=np.zeros((rows, kept), np.int32) if many else None,
            levels=None if ids is None else np.full((rows, ids.shape[1]), np.nan, np.float32),
            level_ids=ids,
        )

    def take(self, row: int, pieces: Floats) -> bool:  # [pieces, labels]
        """Takes in a document's answer, of all its pieces; False where it is no number."""
        if not np.isfinite(pieces.max(axis=1)).all():  # a NaN is the largest there is
            return False
        log_probs = combine(pieces, self.task.chunks)
        self.log_mass[row] = np.logaddexp.reduce(log_probs)
        if self.labels is None:
            self.log_probs[row] = log_probs
        else:
            likeliest = np.argsort(-log_probs, kind="stable")[: self.labels.shape[1]]
            self.labels[row], self.log_probs[row] = likeliest, log_probs[likeliest]
        if self.levels is not None and self.level_ids is not None:
            of_best = self.level_ids[int(log_probs.argmax())]  # [levels]
            for level, wanted in enumerate(of_best):
                if wanted >= 0:
                    below = self.level_ids[:, level] == wanted
                    self.levels[row, level] = np.logaddexp.reduce(log_probs[below])
        return True

    def forget(self, row: int) -> None:
        """The row has no answer after all."""
        self.log_probs[row] = np.nan
        self.log_mass[row] = np.nan
        if self.levels is not None:
            self.levels[row] = np.nan


def level_names(label: str, separator: str) -> list[str]:
    """The levels of a label, each with what it lies below.

    level_names("a/b/c", "/") -> ["a", "a/b", "a/b/c"]
    """
    parts = label.split(separator)
    return [separator.join(parts[:end]) for end in range(1, len(parts) + 1)]


def _level_ids(labels: Sequence[str], separator: str) -> NDArray[np.int32]:  # [labels, levels]
    names = [level_names(label, separator) for label in labels]
    deepest = max(map(len, names))
    known: dict[str, int] = {}
    ids = np.full((len(labels), deepest), -1, np.int32)
    for row, of_label in enumerate(names):
        for level, name in enumerate(of_label):
            ids[row, level] = known.setdefault(name, len(known))
    return ids
