"""Count the tokens that a model really reads, where they enter it.

Knows the model's embedding, and what is laid out below documents. Knows nothing of prompts, of
trees or of how anything is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


@dataclass(slots=True)
class TokensRead:
    """Grows while `counting_tokens` is entered."""

    tokens: int = 0


class AtOnce(Protocol):
    """What goes through the model together with a document."""

    @property
    def opening_tokens(self) -> int:
        """Tokens of the opening that every document reads again."""

    @property
    def question_tokens(self) -> int:
        """Tokens that go through the model below every document."""


def read_at_once(laid_out: AtOnce, documents: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The tokens of the documents, with what they read of the opening, and those below them."""
    read = sum(len(document) for document in documents)
    count = len(documents)
    return read + count * laid_out.opening_tokens, count * laid_out.question_tokens


@contextmanager
def counting_tokens(embedding: nn.Module) -> Iterator[TokensRead]:
    """Counts the token ids that go through the embedding inside the block."""
    read = TokensRead()

    def count(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        read.tokens += inputs[0].numel()

    handle = embedding.register_forward_pre_hook(count)
    try:
        yield read
    finally:
        handle.remove()
