"""Packing loses no document and keeps its budget."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from pipeline.inference.schedules.batching import pack


@pytest.mark.parametrize(
    "lengths, max_tokens, batches",
    [
        ([5, 1, 4], 6, [[0], [2, 1]]),
        ([], 6, []),
        ([7], 6, [[0]]),
        ([7, 7, 1], 6, [[0], [1], [2]]),
        ([3, 3, 3, 3], 6, [[0, 1], [2, 3]]),
        ([6, 6], 6, [[0], [1]]),
        ([0, 0], 6, [[0, 1]]),
        ([2, 2], 1, [[0], [1]]),
    ],
)
def test_packing_by_hand(lengths: list[int], max_tokens: int, batches: list[list[int]]) -> None:
    assert pack(lengths, max_tokens=max_tokens) == batches


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("max_tokens", [1, 10, 37, 100, 10_000])
def test_packing_loses_nothing_and_keeps_its_budget(seed: int, max_tokens: int) -> None:
    source = random.Random(seed)
    lengths = [source.choice([1, 2, 9, 10, 11, 40, 150]) for _ in range(source.randint(1, 60))]
    batches = pack(lengths, max_tokens=max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= max_tokens
    packed = [lengths[index] for batch in batches for index in batch]
    assert packed == sorted(lengths, reverse=True)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("max_tokens", [1, 37, 100, 10_000])
def test_padded_batches_keep_their_budget_with_padding(seed: int, max_tokens: int) -> None:
    source = random.Random(seed)
    lengths = [source.choice([1, 2, 9, 10, 11, 40, 150]) for _ in range(source.randint(1, 60))]
    batches = pack(lengths, max_tokens=max_tokens, padded=True)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch, after in pairwise([*batches, []]):
        longest = lengths[batch[0]]
        assert longest == max(lengths[i] for i in batch)
        assert len(batch) == 1 or longest * len(batch) <= max_tokens
        assert not after or longest * (len(batch) + 1) > max_tokens


@pytest.mark.parametrize("seed", range(5))
def test_neighbouring_batches_could_not_have_been_one(seed: int) -> None:
    source = random.Random(seed)
    lengths = [source.randint(1, 30) for _ in range(50)]
    batches = pack(lengths, max_tokens=60)
    assert len(batches) > 1
    for left, right in pairwise(batches):
        assert sum(lengths[i] for i in left) + lengths[right[0]] > 60
