"""Attention over one span equals its definition."""

from __future__ import annotations

import pytest
import torch
from dense_oracle import (
    COPIES,
    CPU_KERNELS,
    GROUPS,
    SCALE,
    assert_same,
    cpu_kernel,
    dense,
    everything,
    some,
    some_kv,
)
from hypothesis import given
from hypothesis import strategies as st

from pipeline.inference.attention.kernels import attend


@CPU_KERNELS
@given(COPIES, GROUPS, st.integers(1, 70), st.none() | st.integers(1, 80))
def test_causal_attention_sees_no_later_key_and_none_before_the_window(
    kernel: str, copies: int, group: tuple[int, int], tokens: int, window: int | None
) -> None:
    heads, kv_heads = group
    q, kv = some(0, copies, tokens, heads), some_kv(1, copies, tokens, kv_heads)
    with cpu_kernel(kernel):
        attended = attend(q, kv.k, kv.v, scale=SCALE, causal=True, window=window)
    seen = everything(tokens, tokens).tril().triu(1 - (window or tokens))
    assert_same(attended, dense(q, kv, seen))


@CPU_KERNELS
@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
@given(COPIES, GROUPS, st.integers(1, 40), st.integers(1, 200), st.integers(0, 99), st.booleans())
def test_attending_is_a_softmax_over_the_keys_that_a_query_sees(
    kernel: str,
    softcap: float | None,
    copies: int,
    group: tuple[int, int],
    tokens: int,
    keys: int,
    gap: int,
    is_windowed: bool,
) -> None:
    """A query that sees no key has nothing: out 0, and lse -inf."""
    heads, kv_heads = group
    q, kv = some(0, copies, tokens, heads), some_kv(1, copies, keys, kv_heads)
    # — the first query sees no key where it is 50 positions or more after the last one
    offset, window = keys - 1 + gap, 50 if is_windowed else None
    distance = offset + torch.arange(tokens)[:, None] - torch.arange(keys)
    seen = distance < window if window else everything(tokens, keys)
    with cpu_kernel(kernel):
        attended = attend(q, kv.k, kv.v, scale=SCALE, offset=offset, window=window, softcap=softcap)
    assert_same(attended, dense(q, kv, seen, softcap))
    blind = ~seen.any(dim=1)
    assert attended.out[:, blind].eq(0).all()
    assert attended.lse[:, blind].eq(-torch.inf).all()
