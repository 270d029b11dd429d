"""The answers to one shard's questions, as they come in: by runs of documents, piece by piece.

Knows rows, pieces and log-probabilities. Knows nothing of text, of files or of where rows go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline.inference.engine import Labelled, Usage
from pipeline.inference.pieces import combine
from pipeline.spec import TaskSpec

OUT_OF_MEMORY = "error:out of memory, even alone"
NOT_A_NUMBER = "error:the model's answer is not a number"


@dataclass(slots=True)
class Answers:
    """What is known of each row; a row that has no pieces is not asked about."""

    pieces: Sequence[Sequence[Sequence[int]]]  # token ids, by row and piece
    tasks: Sequence[TaskSpec]
    by_task: list[NDArray[np.float32]] = field(init=False)  # [rows, labels], NaN: no answer
    failed: dict[int, str] = field(default_factory=dict)  # status by row
    usage: Usage = field(default_factory=Usage)

    def __post_init__(self) -> None:
        rows = len(self.pieces)
        self.by_task = [np.full((rows, len(t.labels)), np.nan, np.float32) for t in self.tasks]

    @property
    def asked_rows(self) -> int:
        """How many rows the model is asked about."""
        return sum(1 for document in self.pieces if document) if self.tasks else 0

    def take(
        self, start: int, documents: Sequence[Sequence[Sequence[int]]], labelled: Labelled
    ) -> None:
        """Takes in the answers about the documents from row `start` on."""
        self.usage += labelled.usage
        edges = np.cumsum([0, *(len(document) for document in documents)])
        for row, (first, last) in enumerate(pairwise(edges), start):
            if first == last:
                continue
            for task, rows, log_probs in zip(
                self.tasks, self.by_task, labelled.log_probs, strict=True
            ):
                rows[row] = combine(log_probs[first:last], task.chunks)
                if np.isnan(rows[row]).any():
                    self.failed[row] = NOT_A_NUMBER
            if any(first <= piece < last for piece in labelled.out_of_memory):
                self.failed[row] = OUT_OF_MEMORY

    def set_aside(self, rows: Iterable[int], status: str) -> None:
        """These were not asked about, and why."""
        self.failed |= dict.fromkeys(rows, status)

    def status(self, read: Sequence[str]) -> list[str]:
        """Each row's status: as it was read, or what became of it here."""
        for row in self.failed:
            for rows in self.by_task:
                rows[row] = np.nan
        return [self.failed.get(row, status) for row, status in enumerate(read)]
