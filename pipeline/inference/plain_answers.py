"""Answers in the model's own words, read at once: first tokens, or whole labels along their trie.

Knows questions as tokens, and states below documents. Knows nothing of text, of files or of
forwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.inference.model import LoadedModel
from pipeline.inference.reading import read_at_once
from pipeline.inference.readout import FirstTokens
from pipeline.inference.schedules import Schedule
from pipeline.inference.tokens import Question
from pipeline.inference.whole_labels import WholeLabels, label_log_probs


class PlainAnswers:
    """Questions of which none is searched, laid out once for any documents."""

    def __init__(
        self, questions: Sequence[Question], schedule: Schedule, model: LoadedModel
    ) -> None:
        self._asked = schedule.ask([s for question in questions for s in question.sequences])
        self._words = [own_words(question, model.device) for question in questions]
        self._unembed = model.unembed
        self.alone = [tokens for question in questions for tokens in question.alone]
        self.question_tokens = self._asked.question_tokens

    def tokens_read(self, documents: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Of documents, and below them."""
        return read_at_once(self._asked, documents)

    def answers(self, documents: Sequence[Sequence[int]]) -> list[Tensor]:
        """One [docs, labels] fp32 a question."""
        states = self._asked.states(documents)  # [sequences, docs, hidden]
        return label_log_probs(states, self._words, self._unembed)


def own_words(question: Question, device: torch.device) -> FirstTokens | WholeLabels:
    """What the states at the question's sequences are read for."""
    if question.trie is None:
        return FirstTokens.of(list(question.labels.values()), device)
    return WholeLabels.of(question.trie, device)
