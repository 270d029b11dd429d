"""Group questions by how they are scored, so that each document is read once if possible.

    trained readouts   ──┐
    first tokens       ──┼── one forward over whole documents
    full labels        ──┘
    beams, large tries ──── a search below a document whose keys and values are kept

Entry point: `compile_questions`. Without readouts, first tokens and full labels are read below the
kept document too, so a document is read once. A readout may need the states of any layer, which a
kept document does not have: only a call with both readouts and searches reads documents twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pipeline.inference.labels.answers import OnePassQuestions, Readouts
from pipeline.inference.labels.prompt_tokens import Question
from pipeline.inference.labels.searched import SearchedQuestions
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules import Schedule
from pipeline.inference.schedules.batching import Usage


def compile_questions(
    questions: Sequence[Question],
    schedule: Schedule,
    model: LoadedModel,
    readouts: Readouts,
) -> QuestionBatch:
    """The questions, in as few forward passes as their kinds allow."""
    searched = [question for question in questions if question.searched]
    if not searched:
        return OnePassQuestions(questions, schedule, model, readouts)
    if not any(question.name in readouts for question in questions):
        return SearchedQuestions(questions, schedule, model)
    others = [question for question in questions if not question.searched]
    return _TwoPassQuestions(
        OnePassQuestions(others, schedule, model, readouts),
        SearchedQuestions(searched, schedule, model),
        [question.searched for question in questions],
    )


class _TwoPassQuestions:
    """Questions of one pass and searched questions, each with its own reading of a document."""

    has_searches = True

    def __init__(
        self, one_pass: OnePassQuestions, search: SearchedQuestions, searched: Sequence[bool]
    ) -> None:
        self._one_pass, self._search, self._searched = one_pass, search, searched
        self.question_tokens = one_pass.question_tokens
        self.suffix_lengths = [*one_pass.suffix_lengths, *search.suffix_lengths]

    def answers(self, documents: Sequence[Sequence[int]], *, max_tokens: int) -> list[Tensor]:
        one_pass = iter(self._one_pass.answers(documents, max_tokens=max_tokens))
        search = iter(self._search.answers(documents, max_tokens=max_tokens))
        return [next(search) if searched else next(one_pass) for searched in self._searched]

    def tokens_read(self, documents: Sequence[Sequence[int]]) -> Usage:
        return self._one_pass.tokens_read(documents) + self._search.tokens_read(documents)


# Questions that are compiled once and answered for any number of documents.
QuestionBatch = OnePassQuestions | SearchedQuestions | _TwoPassQuestions
