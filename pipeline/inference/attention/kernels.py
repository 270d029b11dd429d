"""Attention of queries over spans of keys, merged by log-sum-exp.

Entry points: `attend` for one span, `merge_into` for two results, `attend_tree` for a plan.
The merge is that of online softmax (Milakov and Gimelshein, 2018) and FlashAttention (Dao et al.,
2022). Attending once to a prefix that many queries share is the decomposition of Hydragen
(Juravsky et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pipeline.inference.attention.plan import AttentionPlan, Rows, Segment

# Scores that the plain kernel holds at once: 16 M x 4 bytes.
_PLAIN_SCORES = 1 << 24


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The keys and values of one layer. Batched ones have a leading `copies` dimension."""

    k: Tensor  # [keys, kv_heads, dim]
    v: Tensor  # [keys, kv_heads, dim]


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention over one span of keys, kept in a form that can be merged with another span's."""

    out: Tensor  # [copies, tokens, heads, dim]
    lse: Tensor  # [copies, tokens, heads] fp32: log of the softmax denominator


def merge_into(a: Attended, b: Attended) -> None:
    """Write attention over both spans at once over `a`, whose every query must have seen a key.

    Associative, so any number of spans folds.
    """
    lse = torch.logaddexp(a.lse, b.lse)
    a.out.mul_((a.lse - lse).exp_().unsqueeze(-1))
    a.out.addcmul_(b.out, (b.lse - lse).exp_().unsqueeze(-1).to(a.out.dtype))
    a.lse.copy_(lse)


def attend(
    q: Tensor,  # [copies, tokens, heads, dim]
    k: Tensor,  # [copies, keys, kv_heads, dim]
    v: Tensor,  # [copies, keys, kv_heads, dim]
    *,
    scale: float,
    causal: bool = False,
    hidden: Tensor | None = None,  # [tokens, keys] bool: keys that a query does not see
    softcap: float | None = None,  # scores become softcap * tanh(score / softcap)
) -> Attended:
    """Attention over one span of keys; a query that sees no key has out 0 and lse -inf.

    With one copy, grouped heads read their shared keys through a stride of 0, without repeating
    them. With several copies, which are questions of few tokens, the keys are repeated.
    """
    copies, tokens, heads, dim = q.shape
    _, keys, kv_heads, _ = k.shape
    group = heads // kv_heads
    q = q.view(copies, tokens, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    shared = (copies, kv_heads, group, keys, dim)
    k = k.transpose(1, 2).unsqueeze(2).expand(shared)
    v = v.transpose(1, 2).unsqueeze(2).expand(shared)
    folded = (kv_heads, group) if copies == 1 else (copies, heads)  # the kernel's batch and heads
    q, k, v = (x.reshape(*folded, x.shape[-2], dim) for x in (q, k, v))
    if q.device.type == "cpu" and softcap is None:
        out, lse = _flash_cpu(q, k, v, scale, causal, hidden)
    else:
        out, lse = _plain(q, k, v, scale, causal, hidden, softcap)
    out = out.view(copies, -1, *out.shape[1:]).movedim(-2, 1).reshape(copies, tokens, heads, dim)
    lse = lse.view(copies, -1, *lse.shape[1:]).movedim(-1, 1).reshape(copies, tokens, heads)
    if hidden is None:
        return Attended(out, lse)
    # The CPU kernel returns lse 0 for a query that sees no key; merged, it would count as one key.
    blind = hidden.all(dim=-1, keepdim=True)  # [tokens, 1]
    return Attended(
        out=out.masked_fill(blind.unsqueeze(-1), 0.0), lse=lse.masked_fill(blind, -torch.inf)
    )


def _flash_cpu(
    q: Tensor,  # [batch, heads, tokens, dim]
    k: Tensor,  # [batch, heads, keys, dim]
    v: Tensor,  # [batch, heads, keys, dim]
    scale: float,
    causal: bool,
    hidden: Tensor | None,  # [tokens, keys] bool
) -> tuple[Tensor, Tensor]:  # [batch, heads, tokens, dim], [batch, heads, tokens] fp32
    mask = None
    if hidden is not None:
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse


def _plain(
    q: Tensor,  # [batch, heads, tokens, dim]
    k: Tensor,  # [batch, heads, keys, dim]
    v: Tensor,  # [batch, heads, keys, dim]
    scale: float,
    causal: bool,
    hidden: Tensor | None,  # [tokens, keys] bool
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # [batch, heads, tokens, dim], [batch, heads, tokens] fp32
    """The definition, a block of queries at a time: for softcap, for other devices, for tests."""
    batch, heads, tokens, _ = q.shape
    keys = k.shape[-2]
    rows = max(1, _PLAIN_SCORES // (batch * heads * keys))
    outs, lses = [], []
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        scores = (q[:, :, start:stop] @ k.transpose(-1, -2)).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if causal:
            ahead = torch.ones(stop - start, keys, dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(ahead.triu_(start + 1), -torch.inf)
        if hidden is not None:
            scores = scores.masked_fill(hidden[start:stop], -torch.inf)
        lse = scores.logsumexp(-1)  # [batch, heads, rows]
        weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
        outs.append(weights.to(v.dtype) @ v)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def attend_causally(
    q: Tensor,  # [copies, tokens, heads, dim]
    k: Tensor,  # [copies, tokens, kv_heads, dim]
    v: Tensor,  # [copies, tokens, kv_heads, dim]
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Attended:
    """Each query over the keys up to its own, or over the last `window` of them.

    Under a window, queries go in blocks, so that a block computes no more keys than it can see.
    """
    _, tokens, _, _ = q.shape
    if window is None:
        return attend(q, k, v, scale=scale, causal=True, softcap=softcap)
    parts = []
    for start, stop in pairwise([*range(0, tokens, window), tokens]):
        first = max(0, start - window + 1)
        shape, offset = (stop - start, stop - first), start - first
        hidden = out_of_window(*shape, offset=offset, window=window, device=q.device)
        queries, keys, values = q[:, start:stop], k[:, first:stop], v[:, first:stop]
        parts.append(attend(queries, keys, values, scale=scale, hidden=hidden, softcap=softcap))
    return Attended(torch.cat([p.out for p in parts], 1), torch.cat([p.lse for p in parts], 1))


def out_of_window(
    queries: int, keys: int, *, offset: int, window: int, device: torch.device
) -> Tensor:  # [queries, keys] bool
    """Which keys each query does not see.

    `offset` is the position of the first query minus that of the first key.
    """
    rows = torch.arange(queries, device=device) + offset
    distance = rows[:, None] - torch.arange(keys, device=device)[None, :]
    return (distance < 0) | (distance >= window)


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
    first, *others = plan.levels
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
    rows: Rows,
) -> Tensor:  # [copies, rows, ...]
    """These rows of a packed tensor, without copying."""
    if rows.copies == 1:
        return x[rows.start : rows.stop].unsqueeze(0)
    return x[rows.start :].unfold(0, rows.tokens, rows.stride).movedim(-1, 1)


def view_attended(whole: Attended, rows: Rows) -> Attended:
    """These rows of an attention of one copy, without copying."""
    return Attended(view_rows(whole.out[0], rows), view_rows(whole.lse[0], rows))
