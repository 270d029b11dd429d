"""Merge attention over several spans of keys by log-sum-exp.

Entry points: `merge_into` for two results, `attend_tree` for a plan. The merge is that of online
softmax (Milakov and Gimelshein, 2018) and FlashAttention (Dao et al., 2022). Attending once to a
prefix that many queries share is the decomposition of Hydragen (Juravsky et al., 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.inference.attention.kernels import (
    Attended,
    LayerKV,
    attend,
    attend_causally,
    out_of_window,
)
from pipeline.inference.attention.plan import AttentionPlan, Range, Segment


def merge_into(a: Attended, b: Attended) -> None:
    """Write attention over both spans at once over `a`, whose every query must have seen a key.

    Associative, so any number of spans folds.
    """
    lse = torch.logaddexp(a.lse, b.lse)
    a.out.mul_((a.lse - lse).exp_().unsqueeze(-1))
    a.out.addcmul_(b.out, (b.lse - lse).exp_().unsqueeze(-1).to(a.out.dtype))
    a.lse.copy_(lse)


def attend_tree(
    q: Tensor,  # [tokens, heads, dim]
    own: LayerKV,  # of the batch's own tokens
    prefix: LayerKV | None,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float | None = None,
) -> Attended:  # of one copy
    """Every row over its span and its ancestors, segment by segment."""
    tokens, heads, _ = q.shape
    first, *others = plan
    if len(first) == 1 and first[0].queries.tokens == tokens:
        whole = attend_segment(q, own, prefix, first[0], scale=scale, softcap=softcap)
    else:
        out = q.new_empty(1, *q.shape)
        whole = Attended(out, out.new_empty(1, tokens, heads, dtype=torch.float32))
        for segment in first:
            part = attend_segment(q, own, prefix, segment, scale=scale, softcap=softcap)
            target = view_attended(whole, segment.queries)
            target.out.copy_(part.out)
            target.lse.copy_(part.lse)
    for segment in (segment for level in others for segment in level):
        part = attend_segment(q, own, prefix, segment, scale=scale, softcap=softcap)
        merge_into(view_attended(whole, segment.queries), part)
    return whole


def attend_segment(
    q: Tensor,  # [tokens, heads, dim]
    own: LayerKV,
    prefix: LayerKV | None,
    segment: Segment,
    *,
    scale: float,
    softcap: float | None = None,
) -> Attended:  # of the segment's copies and queries
    """One segment of a plan."""
    source = prefix if segment.from_prefix else own
    assert source is not None, f"{segment} reads a prefix and the batch has none"
    queries = view_rows(q, segment.queries)
    keys, values = view_rows(source.k, segment.keys), view_rows(source.v, segment.keys)
    if segment.causal:
        return attend_causally(
            queries, keys, values, scale=scale, window=segment.window, softcap=softcap
        )
    hidden = None
    if segment.window is not None:
        shape, offset = (segment.queries.tokens, segment.keys.tokens), segment.offset
        hidden = out_of_window(*shape, offset=offset, window=segment.window, device=q.device)
    return attend(queries, keys, values, scale=scale, hidden=hidden, softcap=softcap)


def view_rows(
    x: Tensor,  # [tokens, ...]
    rows: Range,
) -> Tensor:  # [copies, rows, ...]
    """These rows of a packed tensor, without copying."""
    if rows.copies == 1:
        return x[rows.start : rows.stop].unsqueeze(0)
    return x[rows.start :].unfold(0, rows.tokens, rows.stride).movedim(-1, 1)


def view_attended(whole: Attended, rows: Range) -> Attended:
    """These rows of an attention of one copy, without copying."""
    return Attended(view_rows(whole.out[0], rows), view_rows(whole.lse[0], rows))
