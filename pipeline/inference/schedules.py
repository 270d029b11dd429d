"""How a prompt's levels go through a model: all in one forward, or level by level.

Two schedules, same numbers. Knows which one a model takes. Knows nothing of labels or batching.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from pipeline.inference.depths import Depth, Looked
from pipeline.inference.fused import FusedSchedule
from pipeline.inference.model import LoadedModel
from pipeline.inference.reading import TokensRead
from pipeline.inference.staged import StagedSchedule


class Asked(Protocol):
    """Questions laid out once, for any number of documents."""

    @property
    def opening_tokens(self) -> int:
        """Tokens of the opening that every document reads again."""

    @property
    def question_tokens(self) -> int:
        """Tokens that go through the model below every document."""

    def states(self, documents: Sequence[Sequence[int]]) -> Tensor:  # [questions, docs, hidden]
        """The last layer's normalised states at the questions' last tokens."""


class KeptText(Protocol):
    """A text that was read once, below which more may be read and anything asked."""

    def extended(self, token_ids: Sequence[int]) -> KeptText:
        """The text with one token or more behind it."""

    def states(self, sequences: Sequence[Sequence[int]]) -> Tensor:  # [sequences, hidden]
        """The last layer's normalised states at the last tokens of sequences below the text."""


class Schedule(Protocol):
    """A model that has read its opening."""

    def ask(self, questions: Sequence[Sequence[int]]) -> Asked: ...

    def look(self, depths: Sequence[Depth]) -> Looked: ...

    def keep(self, document: Sequence[int], laid_out: TokensRead) -> KeptText: ...


def read_opening(
    model: LoadedModel, opening: Sequence[int], *, layers: int | None = None
) -> Schedule:
    """The model's own schedule, ready for documents below the opening.

    With `layers`, nothing deeper can be asked for.
    """
    if model.schedule == "staged":
        return StagedSchedule(model, opening, layers=layers)
    return FusedSchedule(model, opening, layers=layers)
