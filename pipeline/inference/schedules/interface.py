"""Where states are read: after which layer, and behind which tokens below a document.

Knows layers and token ids. Knows nothing of models, labels or text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pipeline.inference.schedules.batching import TokensRead

# The tokens below a document at whose last one the state is read; None is the mean of the states
# at the document's own tokens.
Place = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Depth:
    """A layer, and the places whose states are read after it."""

    layer: int
    places: tuple[Place, ...]


# Takes the states after one layer, a place [docs, hidden], of the documents that came so far. Gives
# those of them that go deeper, counted among them and rising; None: all.
Take = Callable[[Depth, Sequence[Tensor]], Sequence[int] | None]


class Looked(Protocol):
    """Places laid out once, for any number of documents."""

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prefix that every document reads again."""

    @property
    def question_tokens(self) -> int:
        """Tokens that go through the model below every document."""

    def descend(self, documents: Sequence[Sequence[int]], take: Take) -> None:
        """Hands the states of every depth to `take`, from the first layer to the deepest."""


def sequences_of(depths: Sequence[Depth]) -> list[tuple[int, ...]]:
    """What is read below a document, once each, in the order of its first place."""
    places = (place for depth in depths for place in depth.places)
    return list(dict.fromkeys(place for place in places if place is not None))


class Asked(Protocol):
    """Questions laid out once, for any number of documents."""

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prefix that every document reads again."""

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
    """A model that has read its prefix."""

    def ask(self, questions: Sequence[Sequence[int]]) -> Asked: ...

    def look(self, depths: Sequence[Depth]) -> Looked: ...

    def keep(self, document: Sequence[int], laid_out: TokensRead) -> KeptText: ...
