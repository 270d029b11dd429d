"""Attention over one span equals its definition, and so does the varlen kernel over many spans.

The varlen kernel is called as each version of torch requires.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from dense_oracle import (
    COPIES,
    CPU_KERNELS,
    GROUPS,
    HEADS,
    SCALE,
    assert_same,
    attend_run_by_run,
    cpu_kernel,
    dense,
    everything,
    some,
    some_kv,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from pipeline.inference.attention.kernels import (
    Attended,
    Kernel,
    LayerKV,
    VarlenBatch,
    attend,
    flash_kernel,
)


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


def varlen_of_2_11(
    q: Tensor,  # [tokens, heads, dim]
    k: Tensor,  # [keys, kv_heads, dim]
    v: Tensor,  # [keys, kv_heads, dim]
    q_starts: Tensor,
    k_starts: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    return_aux: Any,
    scale: float,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor]:  # [tokens, heads, dim], [heads, tokens] fp32
    """What torch documents of its kernel, and asserts of what it is given."""
    assert scale == SCALE and return_aux.lse
    assert q_starts.dtype == k_starts.dtype == torch.int32 and q_starts.is_contiguous()
    assert (q_starts[-1], k_starts[-1]) == (len(q), len(k))
    assert longest_q == max(2, int(q_starts.diff().max()))  # at 1 it may hide no keys
    assert longest_k == int(k_starts.diff().max())
    parts = []
    for (start, stop), (first, last) in zip(
        pairwise(q_starts.tolist()), pairwise(k_starts.tolist()), strict=True
    ):
        behind = torch.arange(stop - start)[:, None] - torch.arange(last - first)[None, :]
        behind += (last - first) - (stop - start)  # the last query's own key is the last
        before, after = window_size
        seen = (behind <= before) | torch.tensor(before < 0)
        seen &= (behind >= -after) | torch.tensor(after < 0)
        kv = LayerKV(k[None, first:last], v[None, first:last])
        parts.append(dense(q[None, start:stop], kv, seen))
    out = torch.cat([part.out[0] for part in parts])
    return out.to(q.dtype), torch.cat([part.lse[0] for part in parts]).T.float().contiguous()


def varlen_of_2_13(
    *args: Any, enable_gqa: bool = False, num_splits: int | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    assert enable_gqa and num_splits == 1
    return varlen_of_2_11(*args, **options)


def varlen_as_documented(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Its lse has the documented order, by tokens."""
    out, lse = varlen_of_2_11(*args, **options)
    return out, lse.T


KERNELS = {
    "twin": attend_run_by_run,
    "2.11": flash_kernel(varlen_of_2_11),
    "2.13": flash_kernel(varlen_of_2_13),
    "documented": flash_kernel(varlen_as_documented),
}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return KERNELS[request.param]


def starts(tokens: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(tokens).cumsum(0).tolist()], dtype=torch.int32)


def some_runs(q_tokens: list[int], k_tokens: list[int], **kind: Any) -> VarlenBatch:
    return VarlenBatch(starts(q_tokens), starts(k_tokens), max(q_tokens), max(k_tokens), **kind)


def block_mask(q_tokens: list[int], k_tokens: list[int], see: Callable[[Tensor], Tensor]) -> Tensor:
    """Each run's queries see of their own keys what `see` leaves; of all others nothing."""
    blocks = [see(torch.ones(q, k)) for q, k in zip(q_tokens, k_tokens, strict=True)]
    return torch.block_diag(*blocks).bool()


def under(q: Tensor, kv: LayerKV, seen: Tensor) -> Attended:
    return dense(q[None], LayerKV(kv.k[None], kv.v[None]), seen)


RUNS = ([3, 2, 1, 9], [5, 7, 2, 9])


@pytest.mark.parametrize("window", [None, 1, 2, 5, 9, 40])
@pytest.mark.parametrize(
    "q_tokens, k_tokens, heads, kv_heads",
    [
        *[(*RUNS, *heads) for heads in HEADS],
        ([1, 1, 1], [4, 3, 2], 6, 2),  # one query a run, for which kernels have another way
        ([6], [9], 6, 2),  # as many tokens as heads: the order of the lse cannot be seen in it
    ],
)
def test_a_query_sees_the_keys_of_its_run_up_to_its_own_or_a_window_of_them(
    q_tokens: list[int],
    k_tokens: list[int],
    heads: int,
    kv_heads: int,
    window: int | None,
    kernel: Kernel,
) -> None:
    q, kv = some(0, sum(q_tokens), heads), some_kv(1, sum(k_tokens), kv_heads)
    found = kernel(q, kv.k, kv.v, some_runs(q_tokens, k_tokens, window=window), scale=SCALE)

    def seen(ones: Tensor) -> Tensor:
        before = ones.shape[1] - ones.shape[0]  # the last query's own key is the last
        return ones.tril(before).triu(before + 1 - (window or 99))

    assert_same(found, under(q, kv, block_mask(q_tokens, k_tokens, seen)))


def test_this_torchs_kernel_takes_one_of_the_signatures() -> None:
    of_2_11 = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    of_2_11 += ["return_aux", "scale", "window_size"]
    of_2_13 = [*of_2_11, "enable_gqa", "seqused_k", "block_table", "num_splits"]
    assert list(inspect.signature(varlen_attn).parameters) in (of_2_11, of_2_13)
