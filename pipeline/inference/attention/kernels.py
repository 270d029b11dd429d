"""Attention over one span of keys, and the merge of two such by log-sum-exp.

Knows queries, keys, values and kernels. Knows nothing of trees, tokens, prompts or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

# Scores that the plain kernel holds at once: 16 M x 4 bytes.
_PLAIN_SCORES = 1 << 24


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention over one span of keys, kept in a form that can be merged with another span's."""

    out: Tensor  # [copies, tokens, heads, dim]
    lse: Tensor  # [copies, tokens, heads] fp32: log of the softmax denominator


def merge(a: Attended, b: Attended) -> Attended:
    """Attention over both spans at once. Associative, so any number of spans folds."""
    lse = torch.logaddexp(a.lse, b.lse)
    seen = lse.masked_fill(lse == -torch.inf, 0)  # -inf less -inf is no number
    weight_a = (a.lse - seen).exp().unsqueeze(-1)  # [copies, tokens, heads, 1]
    weight_b = (b.lse - seen).exp().unsqueeze(-1)
    out = (a.out * weight_a + b.out * weight_b).to(a.out.dtype)
    return Attended(out=out, lse=lse)


def merge_into(a: Attended, b: Attended) -> None:
    """`merge` written over `a`, of which every query has seen a key."""
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
    hidden: Tensor | None = None,  # [tokens, keys] bool: keys a query does not see
    softcap: float | None = None,  # scores become softcap * tanh(score / softcap)
) -> Attended:
    """Attention over one span of keys; a query that sees none has out 0 and lse -inf.

    Grouped heads of a single copy read their shared keys through a stride of 0: nothing is
    repeated. Copies are of questions, whose few keys are.
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
    attended = Attended(out, lse)
    return attended if hidden is None else _blank_unseeing(attended, hidden)


def _flash_cpu(
    q: Tensor,  # [batch, heads, tokens, dim]
    k: Tensor,  # [batch, heads, keys, dim]
    v: Tensor,  # [batch, heads, keys, dim]
    scale: float,
    causal: bool,
    hidden: Tensor | None,  # [tokens, keys] bool
) -> tuple[Tensor, Tensor]:
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
) -> tuple[Tensor, Tensor]:
    """The definition, some queries at a time: for what no fused kernel does, and for the tests."""
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


def _blank_unseeing(attended: Attended, hidden: Tensor) -> Attended:
    """The CPU kernel gives such a query lse 0, which would merge as if it had seen keys."""
    blind = hidden.all(dim=-1, keepdim=True)  # [tokens, 1]
    return Attended(
        out=attended.out.masked_fill(blind.unsqueeze(-1), 0.0),
        lse=attended.lse.masked_fill(blind, -torch.inf),
    )


def attend_causally(
    q: Tensor,  # [copies, tokens, heads, dim]
    k: Tensor,  # [copies, tokens, kv_heads, dim]
    v: Tensor,  # [copies, tokens, kv_heads, dim]
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Attended:
    """Each query over the keys up to its own, or the last `window` of them.

    Under a window the queries go in runs, which compute no more keys than they may see.
    """
    tokens = q.shape[1]
    if window is None:
        return attend(q, k, v, scale=scale, causal=True, softcap=softcap)
    parts = []
    for start, stop in pairwise([*range(0, tokens, window), tokens]):
        first = max(0, start - window + 1)
        hidden = out_of_window(
            stop - start, stop - first, offset=start - first, window=window, device=q.device
        )
        keys, values = k[:, first:stop], v[:, first:stop]
        parts.append(
            attend(q[:, start:stop], keys, values, scale=scale, hidden=hidden, softcap=softcap)
        )
    return Attended(torch.cat([p.out for p in parts], 1), torch.cat([p.lse for p in parts], 1))


def out_of_window(
    queries: int, keys: int, *, offset: int, window: int, device: torch.device
) -> Tensor:
    """Which keys each query does not see: [queries, keys] bool.

    `offset` is the first query's position less the first key's.
    """
    rows = torch.arange(queries, device=device) + offset
    distance = rows[:, None] - torch.arange(keys, device=device)[None, :]
    return (distance < 0) | (distance >= window)
