"""Pack ragged items into batches under a token budget.

Knows lengths. Knows nothing of tokens, documents or models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


def pack(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Indices of `lengths` in batches of at most `max_tokens`, longest first.

    Every index is in exactly one batch. An item above the budget has a batch of its own.
    pack([5, 1, 4], max_tokens=6) -> [[0], [2, 1]]
    """
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or lengths[index] > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(index)
        room -= lengths[index]
    return batches


@dataclass(slots=True)
class TokensRead:
    """Grows while `counting_tokens` is entered."""

    tokens: int = 0


class AtOnce(Protocol):
    """What goes through the model together with a document."""

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prefix that every document reads again."""

    @property
    def question_tokens(self) -> int:
        """Tokens that go through the model below every document."""


def read_at_once(laid_out: AtOnce, documents: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The tokens of the documents, with what they read of the prefix, and those below them."""
    read = sum(len(document) for document in documents)
    count = len(documents)
    return read + count * laid_out.prefix_tokens, count * laid_out.question_tokens


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
