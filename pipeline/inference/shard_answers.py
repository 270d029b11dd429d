"""The answers to one shard's questions, as they come in: by runs of documents, piece by piece.

Knows rows, pieces and log-probabilities. Knows nothing of text, of files or of where rows go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline.inference.chunking import combine
from pipeline.inference.engine import LabelEngine, Labelled, Usage
from pipeline.spec.schema import TaskSpec

# Log-probabilities of all labels of all documents that are asked about together: 32 MB.
ANSWERS_AT_ONCE = 8_000_000

OUT_OF_MEMORY = "error:out of memory, even alone"
NOT_A_NUMBER = "error:the model's answer is not a number"


@dataclass(slots=True)
class ShardAnswers:
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
