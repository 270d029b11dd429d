"""Packing loses no document, keeps its budget, and makes as few batches as its order allows."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.inference.schedules.batching import pack


@pytest.mark.parametrize("padded", [False, True])
@given(
    st.lists(st.sampled_from([0, 1, 2, 9, 10, 11, 40, 150]), max_size=60),
    st.sampled_from([1, 10, 37, 100, 10_000]),
)
def test_packing_loses_nothing_and_keeps_its_budget(
    padded: bool, lengths: list[int], max_tokens: int
) -> None:
    def tokens(*batch: int) -> int:
        own = [lengths[i] for i in batch]
        return len(own) * max(own) if padded else sum(own)

    batches = pack(lengths, max_tokens=max_tokens, padded=padded)
    packed = [index for batch in batches for index in batch]
    assert packed == sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    assert all(len(batch) == 1 or tokens(*batch) <= max_tokens for batch in batches)
    for left, right in pairwise(batches):  # — they could not have been one
        assert tokens(*left, right[0]) > max_tokens
