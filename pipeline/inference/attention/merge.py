"""Merge attention over several spans of keys by log-sum-exp.

Entry points: `merge_into` for two results, `attend_tree` for the plan of a layer, as segments or as
kernel calls. The merge is that of online softmax (Milakov and Gimelshein, 2018) and FlashAttention
(Dao et al., 2022). Attending once to a prefix that many queries share is the decomposition of
Hydragen (Juravsky et al., 2024).
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
    attend_causally,
    out_of_window,
)
from pipeline.inference.attention.plan import Range, Segment

Step = Segment | KernelCall  # of a plan, and of a compiled plan


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
    plan: Sequence[Sequence[Step]],
    *,
    scale: float,
    softcap: float | None = None,
) -> Attended:  # a batch of one
    """Every row over its span and its ancestors, step by step.

    ValueError for a kernel call where scores are capped: no fused kernel does that.
    """
    tokens, heads, _ = q.shape
    first, *others = plan
    if len(first) == 1 and _holds_all_rows(first[0], tokens):
        whole = _attend_step(q, own, prefix, first[0], scale, softcap)
    else:
        out = q.new_empty(1, *q.shape)
        whole = Attended(out, out.new_empty(1, tokens, heads, dtype=torch.float32))
        for step in first:
            assert isinstance(step, Segment), f"{step} of several in the first level"
            part = _attend_step(q, own, prefix, step, scale, softcap)
            target = _view_step(whole, step)
            target.out.copy_(part.out)
            target.lse.copy_(part.lse)
    for step in (step for level in others for step in level):
        part = _attend_step(q, own, prefix, step, scale, softcap)
        target = _view_step(whole, step)
        merge_into(target, part)
        if isinstance(step, KernelCall) and isinstance(step.rows, Tensor):  # — a copy of its rows
            whole.out.index_copy_(1, step.rows, target.out)
            whole.lse.index_copy_(1, step.rows, target.lse)
    return whole


def _holds_all_rows(step: Step, tokens: int) -> bool:
    """Whether the step, alone in the first level, gives all rows, as a batch of one."""
    if isinstance(step, Segment):
        return step.queries.tokens == tokens
    assert step.rows == slice(0, tokens), f"{step.rows} of {tokens} rows"
    return True


def _attend_step(
    q: Tensor,  # [tokens, heads, dim]
    own: LayerKV,
    prefix: LayerKV | None,
    step: Step,
    scale: float,
    softcap: float | None,
) -> Attended:  # of the step's copies and queries
    source = prefix if step.from_prefix else own
    assert source is not None, f"{step} reads a prefix and the batch has none"
    if isinstance(step, KernelCall):
        if softcap is not None:
            raise ValueError(f"a fused kernel does not cap scores (at {softcap})")
        queries = q[step.rows] if isinstance(step.rows, slice) else q.index_select(0, step.rows)
        return step.kernel(queries, source.k[step.keys], source.v[step.keys], step.runs, scale)
    queries, window = view_rows(q, step.queries), step.window
    keys, values = view_rows(source.k, step.keys), view_rows(source.v, step.keys)
    if step.causal:
        return attend_causally(queries, keys, values, scale=scale, window=window, softcap=softcap)
    shape, offset = (step.queries.tokens, step.keys.tokens), step.offset
    masked = out_of_window(*shape, offset=offset, window=window, device=q.device)
    return attend(queries, keys, values, scale=scale, masked=masked, softcap=softcap)


def view_rows(
    x: Tensor,  # [tokens, ...]
    rows: Range,
) -> Tensor:  # [copies, rows, ...]
    """These rows of a packed tensor, without copying."""
    if rows.copies == 1:
        return x[rows.start : rows.stop].unsqueeze(0)
    return x[rows.start :].unfold(0, rows.tokens, rows.stride).movedim(-1, 1)


def _view_step(whole: Attended, step: Step) -> Attended:
    """The step's rows of a batch of one: views, or copies of rows that are gathered."""
    if isinstance(step, Segment):
        rows = step.queries
        return Attended(view_rows(whole.out[0], rows), view_rows(whole.lse[0], rows))
    if isinstance(step.rows, slice):
        return Attended(whole.out[:, step.rows], whole.lse[:, step.rows])
    return Attended(whole.out.index_select(1, step.rows), whole.lse.index_select(1, step.rows))
