"""A call's questions, laid out: each kind of answer where it is read with the fewest tokens.

    read off fitted maps     ──┐
    first tokens             ──┼── at once, in one forward over whole documents
    whole labels             ──┘
    searched: a beam, or very many labels  ──  below a document that is kept

First tokens and whole labels go with the searched ones, where no map is read: then a document is
read once. Maps may need states of it at any layer, which a kept one has not: only where a call has
both is a document read for each. Knows which kind a question is. Knows nothing of how any is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from pipeline.inference.model import LoadedModel
from pipeline.inference.plain_answers import PlainAnswers
from pipeline.inference.schedules import Schedule
from pipeline.inference.searched_answers import SearchedAnswers
from pipeline.inference.tokens import Question
from pipeline.inference.trained import Readouts, TrainedAnswers
from pipeline.spec import ExitSpec


class LaidOut(Protocol):
    """Questions laid out once, for any number of documents."""

    @property
    def question_tokens(self) -> int:
        """Tokens that go through the model together with a document."""

    @property
    def alone(self) -> Sequence[int]:
        """The tokens below a document of each prompt that would ask for this without a tree."""

    def tokens_read(self, documents: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Of documents, and below them, once these have been answered."""

    def answers(self, documents: Sequence[Sequence[int]]) -> list[Tensor]:
        """One [docs, labels] fp32 a question."""


def lay_out(
    questions: Sequence[Question],
    schedule: Schedule,
    model: LoadedModel,
    readouts: Readouts,
    way: ExitSpec | None,
    *,
    max_tokens: Callable[[], int],  # that go through the model at once; memory may lower it
) -> LaidOut:
    """The questions, so that whatever can be read together is."""
    searched = [question.searched for question in questions]
    if any(question.name in readouts for question in questions):
        at_once = [question for question in questions if not question.searched]
        trained = TrainedAnswers(schedule, at_once, readouts, way, model)
        if not any(searched):
            return trained
        below = [question for question in questions if question.searched]
        kept = SearchedAnswers(below, schedule, model, max_tokens=max_tokens)
        return _Both(trained, kept, searched)
    if any(searched):
        return SearchedAnswers(questions, schedule, model, max_tokens=max_tokens)
    return PlainAnswers(questions, schedule, model)


class _Both:
    """What is read at once, and what is searched, each in its own reading of a document."""

    def __init__(self, at_once: LaidOut, kept: LaidOut, searched: Sequence[bool]) -> None:
        self._at_once, self._kept, self._searched = at_once, kept, searched
        self.question_tokens = at_once.question_tokens
        self.alone = [*at_once.alone, *kept.alone]

    def tokens_read(self, documents: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Of documents, and below them."""
        parts = (part.tokens_read(documents) for part in (self._at_once, self._kept))
        of_documents, below = zip(*parts, strict=True)
        return sum(of_documents), sum(below)

    def answers(self, documents: Sequence[Sequence[int]]) -> list[Tensor]:
        """One [docs, labels] fp32 a question."""
        at_once, kept = (iter(p.answers(documents)) for p in (self._at_once, self._kept))
        return [next(kept) if searched else next(at_once) for searched in self._searched]
