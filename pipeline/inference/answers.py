"""The answers to one shard's questions, as they come in: by runs of documents, piece by piece.

Knows rows, pieces and log-probabilities. Knows nothing of text, of files or of where rows go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from pipeline.inference.engine import LabelEngine, Labelled, Usage
from pipeline.inference.task_answers import TaskAnswers
from pipeline.spec import TaskSpec

# Log-probabilities of all labels of all documents that are asked about together: 32 MB.
ANSWERS_AT_ONCE = 8_000_000

OUT_OF_MEMORY = "error:out of memory, even alone"
NOT_A_NUMBER = "error:the model's answer is not a number"


@dataclass(slots=True)
class Answers:
    """What is known of each row; a row that has no pieces is not asked about."""

    pieces: Sequence[Sequence[Sequence[int]]]  # token ids, by row and piece
    tasks: Sequence[TaskSpec]
    by_task: list[TaskAnswers] = field(init=False)
    failed: dict[int, str] = field(default_factory=dict)  # status by row
    usage: Usage = field(default_factory=Usage)

    def __post_init__(self) -> None:
        self.by_task = [TaskAnswers.of(task, len(self.pieces)) for task in self.tasks]

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The rows in runs whose answers stand in memory at once, in order."""
        each = max(1, ANSWERS_AT_ONCE // max(1, sum(len(task.labels) for task in self.tasks)))
        first, pieces = start, 0
        for row in range(start, end):
            if row > first and pieces + len(self.pieces[row]) > each:
                yield first, row
                first, pieces = row, 0
            pieces += len(self.pieces[row])
        if first < end:
            yield first, end

    @property
    def asked_rows(self) -> int:
        """How many rows the model is asked about."""
        return sum(1 for document in self.pieces if document) if self.tasks else 0

    def ask(self, engine: LabelEngine, start: int, end: int) -> None:
        """Takes in the model's answers about the rows from `start` to before `end`."""
        names = [task.name for task in self.tasks]
        for first, last in self.runs(start, end):
            documents = self.pieces[first:last]
            flat = [piece for document in documents for piece in document]
            self.take(first, documents, engine.label(flat, tasks=names))

    def take(
        self, start: int, documents: Sequence[Sequence[Sequence[int]]], labelled: Labelled
    ) -> None:
        """Takes in the answers about the documents from row `start` on."""
        self.usage += labelled.usage
        edges = np.cumsum([0, *(len(document) for document in documents)])
        for row, (first, last) in enumerate(pairwise(edges), start):
            if first == last:
                continue
            for of_task, log_probs in zip(self.by_task, labelled.log_probs, strict=True):
                if not of_task.take(row, log_probs[first:last]):
                    self.failed[row] = NOT_A_NUMBER
            if any(first <= piece < last for piece in labelled.out_of_memory):
                self.failed[row] = OUT_OF_MEMORY

    def set_aside(self, rows: Iterable[int], status: str) -> None:
        """These were not asked about, and why."""
        self.failed |= dict.fromkeys(rows, status)

    def status(self, read: Sequence[str]) -> list[str]:
        """Each row's status: as it was read, or what became of it here."""
        for row in self.failed:
            for of_task in self.by_task:
                of_task.forget(row)
        return [self.failed.get(row, status) for row, status in enumerate(read)]
