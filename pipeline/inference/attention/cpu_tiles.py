"""Attention by tiles on processors: one call of the kernel in `processor/attention.h`.

Entry point: `attend_natively`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.inference.attention.reference import Attended, LayerKV
from pipeline.inference.attention.tiles import TilePlan
from pipeline.inference.processor import native

# Query heads of rows in a tile: enough to use a block of keys often, few enough to stay in the
# cache with it. Tiles of products hold 6 or 32.
_TILE = 192


def attend_natively(
    q: Tensor,  # [queries, heads, dim]
    own: LayerKV,  # of the batch's own rows
    prefix: LayerKV | None,
    plan: TilePlan,
    scale: float,
    softcap: float | None,
    computed: torch.dtype | None = None,
) -> Attended:
    """The attention of all queries; its products are in the number format `computed`.

    None: in that of `q` if the processor has such products, and else in float32.
    """
    queries, heads, dim = q.shape
    kv_heads = own.k.shape[1]
    if own.v.shape != own.k.shape:
        raise ValueError(f"keys of {dim} numbers and values of {own.v.shape[-1]} a head")
    kept = prefix or LayerKV(own.k[:0], own.v[:0])
    inputs = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, own.k, own.v, kept.k, kept.v)]
    rows = max(1, _TILE // (heads // kv_heads))
    tiles = plan.tiles(rows)
    out, lse = q.new_empty(q.shape), q.new_empty(queries, heads, dtype=torch.float32)
    tables = (tiles, plan.subtree_stops, plan.positions, plan.document_starts)
    call = native.Call(
        *(x.data_ptr() for x in (*inputs, out, lse, *tables)),
        *(x.stride()[:2] for x in inputs),
        *(len(tiles), rows, heads, kv_heads, dim),
        *(len(kept.k), len(plan.document_starts) - 1, plan.first),
        torch.iinfo(torch.int32).max if plan.window is None else plan.window,
        scale=scale,
        softcap=softcap or 0.0,
    )
    usual = q.dtype if native.computes(q.dtype) else torch.float32
    native.attend(call, q.dtype, computed or usual)
    return Attended(out, lse)
