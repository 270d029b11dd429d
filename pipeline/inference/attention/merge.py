"""Attention by the plan of a layer, whose segments or kernel calls are merged by log-sum-exp.

Entry point: `attend_tree`. Attending once to a prefix that many queries share is the decomposition
of Hydragen (Juravsky et al., 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.inference.attention.kernels import (
    Attended,
    KernelCall,
    LayerKV,
    attend,
    empty_like,
    merge_into,
)
from pipeline.inference.attention.plan import Range, Segment

Step = Segment | KernelCall  # of a plan, and of a compiled plan


def attend_tree(
    q: Tensor,  # [tokens, heads, dim]
    own: LayerKV,  # of the batch's own tokens
    prefix: LayerKV | None,
    plan: Sequence[Sequence[Step]],
    *,
    scale: float,
    softcap: float | None = None,
    computed: torch.dtype | None = None,
) -> Attended:  # a batch of one
    """Every row over its span and its ancestors, step by step.

    Segments are computed in the number format `computed`; None: that of `q`. ValueError for a
    kernel call where scores are capped: no fused kernel does that.
    """
    tokens, _, _ = q.shape
    first, *others = plan
    if isinstance(first[0], KernelCall):
        assert len(first) == 1, f"{len(first)} kernel calls in the first level"
        assert first[0].rows == slice(0, tokens), f"{first[0].rows} of {tokens} rows"
        whole = _call_kernel(q, own, prefix, first[0], scale, softcap)
    else:
        whole = empty_like(q.unsqueeze(0))
        for step in first:
            assert isinstance(step, Segment), f"{step} after a segment in the first level"
            _attend_segment(whole, q, own, prefix, step, scale, softcap, computed, merge=False)
    for step in (step for level in others for step in level):
        if isinstance(step, Segment):
            _attend_segment(whole, q, own, prefix, step, scale, softcap, computed, merge=True)
            continue
        part = _call_kernel(q, own, prefix, step, scale, softcap)
        if isinstance(step.rows, slice):
            merge_into(Attended(whole.out[:, step.rows], whole.lse[:, step.rows]), part)
            continue
        rows = Attended(whole.out.index_select(1, step.rows), whole.lse.index_select(1, step.rows))
        merge_into(rows, part)
        whole.out.index_copy_(1, step.rows, rows.out)
        whole.lse.index_copy_(1, step.rows, rows.lse)
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
    source, rows = _source(own, prefix, segment), segment.queries
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


def _call_kernel(
    q: Tensor,  # [tokens, heads, dim]
    own: LayerKV,
    prefix: LayerKV | None,
    call: KernelCall,
    scale: float,
    softcap: float | None,
) -> Attended:  # of the call's queries, as a batch of one
    if softcap is not None:
        raise ValueError(f"a fused kernel does not cap scores (at {softcap})")
    source = _source(own, prefix, call)
    queries = q[call.rows] if isinstance(call.rows, slice) else q.index_select(0, call.rows)
    return call.kernel(queries, source.k[call.keys], source.v[call.keys], call.runs, scale)


def _source(own: LayerKV, prefix: LayerKV | None, step: Step) -> LayerKV:
    source = prefix if step.from_prefix else own
    assert source is not None, f"{step} reads a prefix and the batch has none"
    return source


def view_rows(
    x: Tensor,  # [tokens, ...]
    rows: Range,
) -> Tensor:  # [copies, rows, ...]
    """These rows of a packed tensor, without copying."""
    if rows.copies == 1:
        return x[rows.start : rows.stop].unsqueeze(0)
    return x[rows.start :].unfold(0, rows.tokens, rows.stride).movedim(-1, 1)
