"""Pack ragged items into batches under a token budget.

Knows lengths. Knows nothing of tokens, documents or models.
"""

from __future__ import annotations

from collections.abc import Sequence


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
