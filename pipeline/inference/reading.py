"""Count the tokens that a model really reads, where they enter it.

Knows the model's embedding. Knows nothing of prompts, trees or what should be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(slots=True)
class TokensRead:
    """Grows while `counting_tokens` is entered."""

    tokens: int = 0


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
