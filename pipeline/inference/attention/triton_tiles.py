"""Attention by tiles, in Triton: one launch a layer, keys read where they are, nothing gathered.

Entry point: `attend_tiles`. Scores and sums are in float32, by online softmax (Milakov and
Gimelshein, 2018) over blocks of keys, as in FlashAttention (Dao et al., 2022). The query heads that
share a head of the keys are rows of one tile (as in Shazeer's multi-query attention, 2019), so
short questions fill it. What a row gets depends on nothing that it does not see.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from pipeline.inference.attention.reference import Attended, LayerKV
from pipeline.inference.attention.tiles import TilePlan

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


class Blocks(NamedTuple):
    """How large a tile and a block of keys are, and how the GPU runs it."""

    queries: int  # rows times the query heads of a head of keys
    keys: int
    warps: int
    stages: int


# By the padded size of a head, the fastest first. On an H200, with eight questions of 31 tokens
# below documents of 1,000: 240, 264 and 285 TFLOP/s of what the rows need; the others that were
# tried 137 to 242, 146 to 252 and 191 to 269. What follows is for GPUs with less shared memory.
_BLOCKS = {
    64: [Blocks(128, 64, 4, 3), Blocks(64, 32, 4, 3)],
    128: [Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 2)],
    256: [Blocks(128, 64, 8, 2), Blocks(64, 32, 4, 3), Blocks(64, 32, 4, 1), Blocks(16, 16, 4, 1)],
}
_OTHER_BYTES = 1_024  # of shared memory, beside the queries and the blocks of keys and values


@triton.jit
def _step(
    q, states, highest, total, k, v, seen, scale, softcap,
    MASKED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Takes one block of keys into the states, and returns states, highest score and sum."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAPPED:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores * scale / softcap) - 1.0) * _LOG2_E
    else:
        scores = scores * (scale * _LOG2_E)
    if MASKED:
        scores = tl.where(seen, scores, -float("inf"))
    raised = tl.maximum(highest, tl.max(scores, 1))
    # a row that has seen nothing yet has weights of 0, not of inf - inf
    finite = tl.where(raised == -float("inf"), 0.0, raised) if MASKED else raised
    weights = tl.exp2(scores - finite[:, None])
    kept = tl.exp2(highest - finite)
    states = states * kept[:, None]
    states = tl.dot(weights.to(v.dtype), v, states, input_precision="ieee")
    return states, raised, total * kept + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["prefix_tokens", "first_query", "window"])
def _tree_attention(
    q, k, v, prefix_k, prefix_v, out, lse, tiles, subtree_stops, positions,
    q_row, q_head, k_row, k_head, v_row, v_head,
    prefix_tokens, first_query, window, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    table, kv_head = tiles + 7 * tl.program_id(0), tl.program_id(1)
    first, stop = tl.load(table), tl.load(table + 1)
    prefix_first = tl.load(table + 2)
    whole_first, whole_stop, own_first = tl.load(table + 3), tl.load(table + 4), tl.load(table + 5)
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, PADDED)
    row, head = first + m // GROUP, kv_head * GROUP + m % GROUP
    is_live = row < stop
    is_dim = (d < DIM)[None, :]
    k, v = k + kv_head * k_head, v + kv_head * v_head
    prefix_row: tl.constexpr = HEADS // GROUP * DIM
    prefix_k, prefix_v = prefix_k + kv_head * DIM, prefix_v + kv_head * DIM
    q_at = (row - first_query).to(tl.int64) * q_row + head * q_head
    queries = tl.load(q + q_at[:, None] + d[None, :], mask=is_live[:, None] & is_dim, other=0.0)
    states = tl.zeros([M, PADDED], tl.float32)
    highest = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    place = tl.load(positions + row, mask=is_live, other=0) if WINDOWED else row

    for start in range(prefix_first, prefix_tokens, N):
        key = start + n
        is_key = key < prefix_tokens
        at = key.to(tl.int64)[:, None] * prefix_row + d[None, :]
        block_k = tl.load(prefix_k + at, mask=is_key[:, None] & is_dim, other=0.0)
        block_v = tl.load(prefix_v + at, mask=is_key[:, None] & is_dim, other=0.0)
        seen = is_key[None, :]
        if WINDOWED:
            seen = seen & (place[:, None] - key[None, :] < window)
        states, highest, total = _step(
            queries, states, highest, total, block_k, block_v, seen, scale, softcap, True, CAPPED
        )

    whole = (whole_stop - whole_first) // N * N
    for start in range(whole_first, whole_first + whole, N):
        key = start + n
        at = key.to(tl.int64)[:, None]
        if PADDED == DIM:
            block_k = tl.load(k + at * k_row + d[None, :])
            block_v = tl.load(v + at * v_row + d[None, :])
        else:
            block_k = tl.load(k + at * k_row + d[None, :], mask=is_dim, other=0.0)
            block_v = tl.load(v + at * v_row + d[None, :], mask=is_dim, other=0.0)
        seen = is_dim
        if WINDOWED:
            seen = place[:, None] - tl.load(positions + key)[None, :] < window
        states, highest, total = _step(
            queries, states, highest, total, block_k, block_v, seen, scale, softcap,
            WINDOWED, CAPPED,
        )  # fmt: skip

    # the last rows of the whole range, and after them the tile's own
    rest_first = whole_first + whole
    rest = whole_stop - rest_first
    for start in range(0, rest + stop - own_first, N):
        place_of_key = start + n
        key = tl.where(
            place_of_key < rest, rest_first + place_of_key, own_first + place_of_key - rest
        )
        is_key = key < stop
        below = tl.load(subtree_stops + key, mask=is_key, other=0)
        # — else no row of the tile is below one of these keys: they are of other questions
        if tl.max(below, 0) > first:
            at = key.to(tl.int64)[:, None]
            live = is_key[:, None] & is_dim
            block_k = tl.load(k + at * k_row + d[None, :], mask=live, other=0.0)
            block_v = tl.load(v + at * v_row + d[None, :], mask=live, other=0.0)
            seen = (key[None, :] <= row[:, None]) & (row[:, None] < below[None, :])
            if WINDOWED:
                key_place = tl.load(positions + key, mask=is_key, other=0)
                seen = seen & (place[:, None] - key_place[None, :] < window)
            states, highest, total = _step(
                queries, states, highest, total, block_k, block_v, seen, scale, softcap,
                True, CAPPED,
            )  # fmt: skip

    total = tl.where(is_live, total, 1.0)
    out_at = (row - first_query).to(tl.int64) * HEADS + head
    result = (states / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_at[:, None] * DIM + d[None, :], result, mask=is_live[:, None] & is_dim)
    tl.store(lse + out_at, (highest + tl.log2(total)) / _LOG2_E, mask=is_live)


def attend_tiles(
    q: Tensor,  # [tokens, heads, dim]
    own: LayerKV,  # [tokens, kv_heads, dim]
    prefix: LayerKV | None,
    plan: TilePlan,
    scale: float,
    softcap: float | None,
) -> Attended:
    """The attention of all queries in one launch.

    ValueError if keys and values differ in size; RuntimeError if Triton does not run here.
    """
    tokens, heads, dim = q.shape
    _, kv_heads, _ = own.k.shape
    if own.v.shape != own.k.shape:
        raise ValueError(f"keys of {dim} numbers and values of {own.v.shape[-1]} a head")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, own.k, own.v))
    kept = prefix or LayerKV(own.k[:0], own.v[:0])
    padded, group = max(16, triton.next_power_of_2(dim)), heads // kv_heads
    blocks = blocks_for(padded, q.dtype.itemsize, q.device)
    tiles = plan.tiles(max(1, blocks.queries // group))
    out = q.new_empty(tokens, heads, dim)
    lse = q.new_empty(tokens, heads, dtype=torch.float32)
    try:
        with torch.cuda.device_of(q):
            _tree_attention[(len(tiles), kv_heads)](
                *(q, k, v, kept.k.contiguous(), kept.v.contiguous(), out, lse),
                *(tiles, plan.subtree_stops, plan.positions),
                *(stride for x in (q, k, v) for stride in x.stride()[:2]),
                *(len(kept.k), plan.first, plan.window or 0, scale, softcap or 0.0),
                HEADS=heads,
                GROUP=group,
                DIM=dim,
                PADDED=padded,
                M=max(blocks.queries, triton.next_power_of_2(group)),
                N=blocks.keys,
                WINDOWED=plan.window is not None,
                CAPPED=softcap is not None,
                num_warps=blocks.warps,
                num_stages=blocks.stages,
            )
    except TritonError as error:
        raise RuntimeError(f"Triton cannot compile the attention: {error}") from error
    return Attended(out, lse)


@cache
def blocks_for(padded_dim: int, item_bytes: int, device: torch.device) -> Blocks:
    """The first blocks for heads of this size that fit into the GPU's shared memory."""
    if device.type != "cuda":  # Triton's interpreter
        return Blocks(queries=32, keys=16, warps=4, stages=1)
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    for blocks in _BLOCKS[min(max(padded_dim, 64), 256)]:
        rows = blocks.queries + 2 * blocks.stages * blocks.keys
        if rows * padded_dim * item_bytes + _OTHER_BYTES <= properties["max_shared_mem"]:
            return blocks
    raise RuntimeError(f"heads of {padded_dim} numbers do not fit into the GPU's shared memory")
