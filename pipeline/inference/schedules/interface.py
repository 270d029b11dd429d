"""What a schedule offers: hidden states of documents and of the tokens below them. See `Schedule`.

Two schedules implement these protocols with the same numbers: `fused` and `staged`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pipeline.inference.schedules.batching import TokenCounter, Usage

Suffix = tuple[int, ...]  # token ids that follow a document: a question, and perhaps label tokens


@dataclass(frozen=True, slots=True)
class ReadPoint:
    """A layer after which hidden states are read: those at suffixes, the documents' mean, or both.

    Layer N gives the `hidden_states[N]` of transformers. After the last layer the states are
    normalised.
    """

    layer: int
    suffixes: tuple[Suffix, ...] = ()  # each is read at its last token
    mean: bool = False  # the mean of the states at a document's own tokens


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The hidden states of one read point."""

    layer: int
    at_suffixes: Tensor  # [suffixes, docs, hidden], in the order of the read point
    mean: Tensor | None  # [docs, hidden] fp32

    def of_documents(self, documents: Sequence[int]) -> LayerStates:
        """The states of these documents alone."""
        mean = None if self.mean is None else self.mean[documents]
        return LayerStates(self.layer, self.at_suffixes[:, documents], mean)


# Takes the states of the documents that are left. Returns which of these continue to the next read
# point, as rising indices into them, or None if all do.
OnLayer = Callable[[LayerStates], Sequence[int] | None]


class HiddenStateReader(Protocol):
    """Read points, prepared once for any number of documents."""

    @property
    def repeated_prefix_tokens(self) -> int:
        """Tokens of the prefix that are read again with every document."""

    @property
    def question_tokens(self) -> int:
        """Tokens below every document that go through the model, padding included."""

    def read_layers(self, documents: Sequence[Sequence[int]], on_layer: OnLayer) -> None:
        """Gives the states of every read point to `on_layer`, from the first layer down."""


def tokens_read(reader: HiddenStateReader, documents: Sequence[Sequence[int]]) -> Usage:
    """The tokens that a reader puts through the model for these documents."""
    count, own = len(documents), sum(map(len, documents))
    return Usage(own + count * reader.repeated_prefix_tokens, count * reader.question_tokens)


class CachedText(Protocol):
    """A text that was read once: longer texts and suffixes are read below it."""

    def extended(self, token_ids: Sequence[int]) -> CachedText:
        """The text followed by these tokens, at least one."""

    def states(self, suffixes: Sequence[Suffix]) -> Tensor:  # [suffixes, hidden]
        """The last layer's normalised states at the last tokens of suffixes."""


class Schedule(Protocol):
    """A model that has read its prefix."""

    def reader(self, points: Sequence[ReadPoint]) -> HiddenStateReader:
        """A reader of these points, whose layers rise."""

    def cache_text(self, document: Sequence[int], counter: TokenCounter) -> CachedText:
        """A document that is read once. `counter` grows with all tokens read for it."""


def deliver(states_by_layer: Iterable[LayerStates], on_layer: OnLayer) -> None:
    """Gives states that are all computed to `on_layer`, without the documents that left before."""
    remaining: list[int] | None = None
    for states in states_by_layer:
        continuing = on_layer(states if remaining is None else states.of_documents(remaining))
        if continuing is None:
            continue
        remaining = [d if remaining is None else remaining[d] for d in continuing]
        if not remaining:
            return
