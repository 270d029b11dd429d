"""Attention by the plan of a layer, whose segments are merged by log-sum-exp.

Entry point: `attend_tree`. Attending once to a prefix that many queries share is the decomposition
of Hydragen (Juravsky et al., 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.inference.attention.kernels import (
    Attended,
    LayerKV,
    attend,
    empty_like,
)
from pipeline.inference.attention.plan import AttentionPlan, Range, Segment


def attend_tree(
    q: Tensor,  # [tokens, heads, dim]
    own: LayerKV,  # of the batch's own tokens
    prefix: LayerKV | None,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float | None = None,
    computed: torch.dtype | None = None,
) -> Attended:  # a batch of one
    """Every row over its span and its ancestors, segment by segment.

    They are computed in the number format `computed`; None: that of `q`.
    """
    whole = empty_like(q.unsqueeze(0))
    for number, level in enumerate(plan):
        for segment in level:
            merge = number > 0
            _attend_segment(whole, q, own, prefix, segment, scale, softcap, computed, merge=merge)
    return whole


def _attend_segment(
    whole: Attended,  # a batch of one, which is written
    q: Tensor,  # [tokens, heads, dim]
    own: LayerKV,
    prefix: LayerKV | None,
    segment: Segment,
    scale: float,
    softcap: float | None,
    computed: torch.dtype | None,
    *,
    merge: bool,
) -> None:
    source, rows = prefix if segment.from_prefix else own, segment.queries
    assert source is not None, f"{segment} reads a prefix and the batch has none"
    attend(
        view_rows(q, rows),
        view_rows(source.k, segment.keys),
        view_rows(source.v, segment.keys),
        scale=scale,
        causal=segment.causal,
        offset=0 if segment.causal else segment.offset,
        window=segment.window,
        softcap=softcap,
        computed=computed,
        into=Attended(view_rows(whole.out[0], rows), view_rows(whole.lse[0], rows)),
        merge=merge,
    )


def view_rows(
    x: Tensor,  # [tokens, ...]
    rows: Range,
) -> Tensor:  # [copies, rows, ...]
    """These rows of a packed tensor, without copying."""
    if rows.copies == 1:
        return x[rows.start : rows.stop].unsqueeze(0)
    return x[rows.start :].unfold(0, rows.tokens, rows.stride).movedim(-1, 1)
