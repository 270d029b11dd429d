"""The fused schedule: documents and their questions in one forward, nothing kept after a layer.

Knows token ids and the packed tree. Knows nothing of labels, text or batching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.inference.branches import Branches
from pipeline.inference.depths import Depth
from pipeline.inference.descent import FusedDepths
from pipeline.inference.forward import end_states, prefill
from pipeline.inference.layers import PrefixKV
from pipeline.inference.model import LoadedModel
from pipeline.inference.reading import TokensRead
from pipeline.inference.tree import Tree


class FusedSchedule:
    """A model with the keys and values of its opening."""

    def __init__(
        self, model: LoadedModel, opening: Sequence[int], *, layers: int | None = None
    ) -> None:
        self._model = model
        self._prefix = prefill(model, opening, layers=layers)

    def ask(self, questions: Sequence[Sequence[int]]) -> FusedQuestions:
        """The questions, laid out below any document; what several begin with is read once."""
        return FusedQuestions(self._model, self._prefix, questions)

    def look(self, depths: Sequence[Depth]) -> FusedDepths:
        """The places of states at several layers, laid out below any document."""
        return FusedDepths(self._model, self._prefix, depths)

    def keep(self, document: Sequence[int], laid_out: TokensRead) -> FusedText:
        """A document that is read once, for whatever will be asked below it."""
        return FusedText(self._model, self._prefix, (), laid_out).extended(document)


class FusedQuestions:
    """Questions as the branches of one tree."""

    opening_tokens = 0

    def __init__(
        self, model: LoadedModel, prefix: PrefixKV | None, questions: Sequence[Sequence[int]]
    ) -> None:
        self._model = model
        self._prefix = prefix
        self._branches = Branches.of(questions)
        self._ends = sorted(set(self._branches.ends))
        places = [self._ends.index(end) for end in self._branches.ends]
        self._end_of_question = torch.tensor(places, device=model.device)  # [questions] int64

    @property
    def question_tokens(self) -> int:
        return len(self._branches.token_ids)

    def states(self, documents: Sequence[Sequence[int]]) -> Tensor:  # [questions, docs, hidden]
        """The states at the questions' last tokens, in one forward over whole documents."""
        tree = Tree.of(
            [len(document) for document in documents],
            self._branches.nodes,
            prefix_tokens=self._prefix.tokens if self._prefix else 0,
        )
        read = [token for document in documents for token in document]
        token_ids = [*read, *self._branches.token_ids * len(documents)]
        states = end_states(
            self._model, token_ids, tree, prefix=self._prefix, ends=self._ends
        )  # [docs, ends, hidden]
        return states[:, self._end_of_question].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class FusedText:
    """A text whose keys and values are kept, but for its last token, which every forward reads."""

    model: LoadedModel
    prefix: PrefixKV | None
    left: tuple[int, ...]
    laid_out: TokensRead  # grows by what is read here

    def extended(self, token_ids: Sequence[int]) -> FusedText:
        """The text with these behind it."""
        *read, last = (*self.left, *token_ids)
        self.laid_out.tokens += len(read)
        return replace(self, prefix=prefill(self.model, read, prefix=self.prefix), left=(last,))

    def states(self, sequences: Sequence[Sequence[int]]) -> Tensor:  # [sequences, hidden]
        """The states at the sequences' last tokens, in one forward."""
        asked = FusedQuestions(self.model, self.prefix, sequences)
        self.laid_out.tokens += len(self.left) + asked.question_tokens
        return asked.states([self.left])[:, 0]
