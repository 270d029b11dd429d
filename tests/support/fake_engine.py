"""Engines that answer at once, from a hash of what they are asked.

`FakeEngine` answers by the tokens of a document; `Answering` by the question and the text (`p_of`),
and notes what it is asked.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import decoders, pre_tokenizers

from pipeline.inference.engine import Labelled
from pipeline.inference.schedules.batching import Usage
from pipeline.spec.tasks import TaskSpec

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())

Asked = Counter[tuple[str, str]]  # how often a question was asked about a text


class FakeEngine:
    """Stands in for `LabelEngine`. Law: equal tokens and task, equal answers."""

    def __init__(self, tasks: Sequence[TaskSpec]) -> None:
        self._labels = {task.name: len(task.labels) for task in tasks}

    def label(
        self,
        documents: Sequence[Sequence[int]],
        *,
        tasks: Sequence[str],
        on_batch: Callable[[Sequence[int]], None] = lambda _documents: None,
    ) -> Labelled:
        log_probs = tuple(
            np.stack([self._answer(document, task) for document in documents]) for task in tasks
        )
        usage = Usage(sum(map(len, documents)), len(documents) * len(tasks))
        on_batch(range(len(documents)))
        return Labelled(log_probs, usage)

    def _answer(self, document: Sequence[int], task: str) -> NDArray[np.float32]:  # [labels]
        seed = zlib.crc32(f"{task} {[int(token) for token in document]}".encode())
        weights = np.random.default_rng(seed).uniform(0.1, 1, self._labels[task])
        return np.log(weights / weights.sum() / 2).astype(np.float32)


def text_of(document: Sequence[int]) -> str:
    """The text of these tokens of the byte tokenizer."""
    decoded: str = decoders.ByteLevel().decode([ALPHABET[token] for token in document])
    return decoded


def p_of(question: str, text: str) -> float:
    """What the model answers to a question: the probability of the second label."""
    seed = zlib.crc32(f"{question} {text}".encode())
    return float(np.random.default_rng(seed).uniform(0.001, 0.999))


class Answering(FakeEngine):
    """Answers by the question and the tokens, and notes what it is asked."""

    def __init__(self, job: Any, asked: Asked, broken: set[tuple[str, str]]) -> None:
        super().__init__(job.spec.parts)
        self._questions = {part.name: part.question for part in job.spec.parts}
        self._asked, self._broken = asked, broken

    def label(self, documents: Sequence[Sequence[int]], **how: Any) -> Labelled:
        for task in how["tasks"]:
            question = self._questions[task]
            self._asked.update((question, text_of(document)) for document in documents)
        return super().label(documents, **how)

    def _answer(self, document: Sequence[int], task: str) -> NDArray[np.float32]:  # [labels]
        question = self._questions[task]
        if (question, text_of(document)) in self._broken:
            return np.full(2, np.nan, np.float32)
        p = p_of(question, text_of(document))
        return np.log(np.array([1 - p, p]) / 2).astype(np.float32)
