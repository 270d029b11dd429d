"""Answers that are searched for: below a document that is kept, and so read once for all of them.

Knows questions as tokens, and texts that are kept. Knows nothing of text, of files or of how a
trie is followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pipeline.inference.beam import search
from pipeline.inference.model import LoadedModel
from pipeline.inference.plain_answers import own_words
from pipeline.inference.reading import TokensRead, read_at_once
from pipeline.inference.schedules import KeptText, Schedule
from pipeline.inference.tokens import Question
from pipeline.inference.whole_labels import label_log_probs


class SearchedAnswers:
    """Questions of which some are searched, laid out once for any documents."""

    def __init__(
        self,
        questions: Sequence[Question],
        schedule: Schedule,
        model: LoadedModel,
        *,
        max_tokens: Callable[[], int],  # that go through the model at once; memory may lower it
    ) -> None:
        self._questions, self._schedule, self._max_tokens = questions, schedule, max_tokens
        at_once = [question for question in questions if not question.searched]
        self._sequences = [s for question in at_once for s in question.sequences]
        self._words = [own_words(question, model.device) for question in at_once]
        self._unembed = model.unembed
        self._laid_out = schedule.ask(self._sequences)
        self._read = TokensRead()  # of kept documents, and below them
        self.alone = [tokens for question in questions for tokens in question.alone]
        self.question_tokens = self._laid_out.question_tokens  # what is searched comes later

    def tokens_read(self, documents: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Of documents, and below them: how much of a trie was followed depends on the document."""
        of_documents, _ = read_at_once(self._laid_out, documents)
        return of_documents, self._read.tokens - of_documents

    def answers(self, documents: Sequence[Sequence[int]]) -> list[Tensor]:
        """One [docs, labels] fp32 a question."""
        by_document = [self._answers(document) for document in documents]
        return [torch.cat(of_question) for of_question in zip(*by_document, strict=True)]

    def _answers(self, document: Sequence[int]) -> list[Tensor]:  # one [1, labels] a question
        text = self._schedule.keep(document, self._read)
        at_once: Iterator[Tensor] = iter(())
        if self._words:
            states = text.states(self._sequences).unsqueeze(1)  # [sequences, 1, hidden]
            at_once = iter(label_log_probs(states, self._words, self._unembed))
        return [
            self._search(text, question) if question.searched else next(at_once)
            for question in self._questions
        ]

    def _search(self, text: KeptText, question: Question) -> Tensor:  # [1, labels]
        assert question.trie is not None, question.name
        *opening, last = question.token_ids
        asking = text.extended(opening) if opening else text
        found = search(
            question.trie,
            lambda paths: asking.states([(last, *path) for path in paths]),
            self._unembed,
            beam=question.beam,
            max_tokens=self._max_tokens(),
        )
        return torch.from_numpy(found).unsqueeze(0)
