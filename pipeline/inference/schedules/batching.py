"""Pack documents into batches under a token budget, and count the tokens that a model reads.

Entry points: `pack`, `pad` and `Usage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from operator import add

import numpy as np
from numpy.typing import NDArray


def pack(lengths: Sequence[int], *, max_tokens: int, padded: bool = False) -> list[list[int]]:
    """Indices of `lengths` in batches of at most `max_tokens`, longest first.

    Every index is in exactly one batch. An item above the budget has a batch of its own. With
    `padded`, each item takes as many tokens as the longest of its batch.
    pack([5, 1, 4], max_tokens=6) -> [[0], [2, 1]]
    """
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens = lengths[batches[-1][0]] if batches and padded else lengths[index]
        if not batches or tokens > room:
            batches.append([])
            room, tokens = max_tokens, lengths[index]
        batches[-1].append(index)
        room -= tokens
    return batches


def pad(
    rows: Sequence[Sequence[int]], *, fill: int = 0, left: bool = False, min_width: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:  # both [rows, width]
    """The rows, filled up on one side to the same width, and a mask: 1 for items, 0 for filling."""
    width = max([min_width, *map(len, rows)])
    values = np.full((len(rows), width), fill, np.int64)
    mask = np.zeros_like(values)
    for number, row in enumerate(rows):
        place = slice(width - len(row), None) if left else slice(len(row))
        values[number, place], mask[number, place] = row, 1
    return values, mask


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that went through the model."""

    prefix_tokens_computed: int = 0  # of documents
    question_tokens_computed: int = 0  # all others
    requests: int = 0  # to a server that answered
    not_returned: float = 0.0  # the sum of their probabilities outside the tokens it returned

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(add, astuple(self), astuple(other)))
