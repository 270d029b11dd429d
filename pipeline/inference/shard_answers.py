"""The answers to the questions of one shard, collected while its rows are labelled.

Entry point: `ShardAnswers.label_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline.inference.chunking import combine, deciding
from pipeline.inference.engine import Engine
from pipeline.inference.schedules.batching import Usage
from pipeline.spec.tasks import TaskSpec

# Log-probabilities of the documents that are labelled in one call: 32 MB.
MAX_LOG_PROBS = 8_000_000

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

OUT_OF_MEMORY = "error:out of memory, even alone"
# The tokens of a chunk's questions, roughly, which are added to its own as its cost.
_CHUNK_TOKENS = 100

NO_LABEL = "error:no label has a probability"
NOT_A_NUMBER = "error:the model's answer is not a number"


class ShardAnswers:
    """The answers of each row. The model does not read a row without chunks.

    Of rows with equal texts it reads the first, and the others get its answer, or its failure.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[Sequence[int]]],  # token ids, by row and chunk
        tasks: Sequence[TaskSpec],
        texts: Sequence[Hashable] | None = None,  # by row: what identifies the text; None: its row
    ) -> None:
        self.chunks = chunks
        self.tasks = tasks
        self.by_task = [TaskAnswers.of(task, len(chunks)) for task in tasks]
        self.usage = Usage()
        first: dict[Hashable, int] = {}  # the row of each text that is read
        of_rows = enumerate(zip(chunks, texts or range(len(chunks)), strict=True))
        # — a repeat, and the row that is read for it
        self._first_of = {
            row: first[text]
            for row, (own, text) in of_rows
            if own and first.setdefault(text, row) != row
        }
        self._asked = [() if row in self._first_of else each for row, each in enumerate(chunks)]

    @property
    def asked_rows(self) -> int:
        """How many rows the model reads."""
        return sum(1 for document in self._asked if document) if self.tasks else 0

    def label_rows(
        self,
        engine: Engine,
        on_rows: Callable[[int, float], None] = lambda _rows, _share: None,
    ) -> None:
        """Adds the model's answers about all rows.

        `on_rows` is called after each batch with the number of rows of which it read the last
        chunk, and with the batch's share of the cost of all rows: long documents are read first.
        """
        chunks = [chunk for row in self._asked for chunk in row]
        unread = np.array([*map(len, self._asked)])  # [rows] chunks
        edges = np.append(0, unread.cumsum())  # [rows + 1]: the first chunk of each
        row_of = np.repeat(np.arange(len(unread)), unread)  # [chunks]
        cost = np.array([_CHUNK_TOKENS + len(chunk) for chunk in chunks])
        labels = sum(len(task.labels) for task in self.tasks)
        most, begins = MAX_LOG_PROBS // max(1, labels), [0]  # chunks; rows that a call begins with
        for row, end in enumerate(edges[1:]):
            if end - edges[begins[-1]] > most and edges[row] > edges[begins[-1]]:
                begins.append(row)
        for first, last in pairwise([*edges[begins], len(chunks)]):

            def count(batch: Sequence[int], first: int = first) -> None:
                of_batch = first + np.array(batch, np.int64)
                read, times = np.unique(row_of[of_batch], return_counts=True)
                unread[read] -= times
                on_rows(int((unread[read] == 0).sum()), float(cost[of_batch].sum() / cost.sum()))

            names = [task.name for task in self.tasks]
            labelled = engine.label(chunks[first:last], tasks=names, on_batch=count)
            self.usage += labelled.usage
            reasons = dict.fromkeys(labelled.out_of_memory, OUT_OF_MEMORY)
            reasons |= {chunk: f"error:{reason}" for chunk, reason in labelled.refused.items()}
            failed = {int(row_of[first + chunk]): reason for chunk, reason in reasons.items()}
            rows = np.array([*failed], np.int64)
            read = np.setdiff1d(row_of[first:last], rows)
            for answers, log_probs in zip(self.by_task, labelled.log_probs, strict=True):
                answers.failed[rows] = [*failed.values()]
                answers.add_rows(read, log_probs, edges[read] - first, edges[read + 1] - first)
        repeats, firsts = list(self._first_of), list(self._first_of.values())
        for own in self.by_task:
            kept = (own.log_probs, own.log_mass, own.labels, own.levels, own.failed, own.deciding)
            for values in kept:
                if values is not None:
                    values[repeats] = values[firsts]


@dataclass(frozen=True, slots=True)
class TaskAnswers:
    """The answers to one task that are kept; NaN in a row without an answer."""

    task: TaskSpec
    log_probs: Floats  # [rows, kept]: of every label in order, or of the likeliest in falling order
    log_mass: Floats  # [rows]: of all scored labels together
    labels: NDArray[np.int32] | None  # [rows, kept]: the numbers of the kept labels; None: all
    levels: Floats | None  # [rows, levels]: log-probability along the best path; NaN after its end
    level_ids: NDArray[np.int32] | None  # [labels, levels]: equal for labels below the same node
    failed: NDArray[np.object_]  # [rows]: the status of a row that failed; None in other rows
    deciding: Integers  # [rows]: of several chunks, the one whose answer this is; -1: of no one

    @classmethod
    def of(cls, task: TaskSpec, rows: int) -> TaskAnswers:
        """No answers yet. `top_k` bounds the memory, whatever the number of labels."""
        many = task.top_k is not None
        # — a margin needs two labels, even if one is kept
        kept = min(max(task.top_k or 0, 2), len(task.labels)) if many else len(task.labels)
        ids = _level_ids(list(task.labels), task.separator) if task.separator else None
        return cls(
            task,
            log_probs=np.full((rows, kept), np.nan, np.float32),
            log_mass=np.full(rows, np.nan, np.float32),
            labels=np.zeros((rows, kept), np.int32) if many else None,
            levels=None if ids is None else np.full((rows, ids.shape[1]), np.nan, np.float32),
            level_ids=ids,
            failed=np.full(rows, None),
            deciding=np.full(rows, -1),
        )

    def add_rows(
        self,
        rows: Integers,
        log_probs: Floats,  # [chunks, labels]
        starts: Integers,  # [rows]: the first chunk of each, which has one or more
        stops: Integers,  # [rows]
    ) -> None:
        """Adds the answers of these documents, combined over their chunks; one with NaN failed."""
        best = log_probs.max(axis=1)  # [chunks] — `max` returns NaN if it has one
        invalid = np.concatenate([[0], (~np.isfinite(best)).cumsum()])
        answered = invalid[starts] == invalid[stops]
        self.failed[rows[~answered]] = NOT_A_NUMBER
        if (impossible := np.isneginf(best)).any():
            without = np.concatenate([[0], impossible.cumsum()])
            self.failed[rows[without[starts] < without[stops]]] = NO_LABEL
        rows, starts, stops = rows[answered], starts[answered], stops[answered]
        answers = log_probs[starts]  # [rows, labels]
        for number in np.flatnonzero(stops - starts > 1):
            chunks = log_probs[starts[number] : stops[number]]
            answers[number] = combine(chunks, self.task.chunks)
            if self.task.chunks == "max":
                self.deciding[rows[number]] = deciding(chunks)
        self.log_mass[rows] = np.logaddexp.reduce(answers, axis=1)
        if self.labels is None:
            self.log_probs[rows] = answers
        else:
            for row, answer in zip(rows, answers, strict=True):
                likeliest = np.argsort(-answer, kind="stable")[: self.labels.shape[1]]
                self.labels[row], self.log_probs[row] = likeliest, answer[likeliest]
        if self.levels is not None and self.level_ids is not None:
            for row, answer in zip(rows, answers, strict=True):
                of_best = self.level_ids[int(answer.argmax())]  # [levels]
                for level, node in enumerate(of_best):
                    if node >= 0:
                        below = self.level_ids[:, level] == node  # [labels]
                        self.levels[row, level] = np.logaddexp.reduce(answer[below])

    def status(self, as_read: Sequence[str]) -> list[str]:
        """The status of each row: why it failed, or its status as it was read."""
        return [failed or status for failed, status in zip(self.failed, as_read, strict=True)]


def level_names(label: str, separator: str) -> list[str]:
    """The levels of a hierarchical label, each with its ancestors.

    level_names("a/b/c", "/") -> ["a", "a/b", "a/b/c"]
    """
    parts = label.split(separator)
    return [separator.join(parts[:end]) for end in range(1, len(parts) + 1)]


def _level_ids(labels: Sequence[str], separator: str) -> NDArray[np.int32]:  # [labels, levels]
    """The number of the node of each label at each level; -1 below a label's own level."""
    names = [level_names(label, separator) for label in labels]
    ids = np.full((len(labels), max(map(len, names))), -1, np.int32)
    number: dict[str, int] = {}
    for row, of_label in enumerate(names):
        for level, name in enumerate(of_label):
            ids[row, level] = number.setdefault(name, len(number))
    return ids
