"""Attention of queries over one span of keys.

Entry points: `attend` and `merge_into`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from pipeline.inference.processor import native

# Scores that the plain kernel holds at once: 16 M x 4 bytes.
_PLAIN_SCORES = 1 << 24
# Queries of a block under a window, whose mask has a column for each key of the window.
_WINDOW_ROWS = 256
_PROBE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The keys and values of one layer. Batched ones have a leading dimension."""

    k: Tensor  # [keys, kv_heads, dim]
    v: Tensor  # [keys, kv_heads, dim]

    def followed_by(self, other: LayerKV) -> LayerKV:
        """Both spans, copied."""
        return LayerKV(torch.cat([self.k, other.k]), torch.cat([self.v, other.v]))


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention over one span of keys, kept in a form that can be merged with another span's."""

    out: Tensor  # [batch, tokens, heads, dim]
    lse: Tensor  # [batch, tokens, heads] fp32: log of the softmax denominator


def empty_like(
    q: Tensor,  # [batch, tokens, heads, dim]
) -> Attended:
    """Room for attention of these queries."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return Attended(out, out.new_empty(q.shape[:-1], dtype=torch.float32))


def merge_into(a: Attended, b: Attended) -> None:
    """Write attention over both spans at once over `a`, whose every query must have seen a key.

    Associative, so any number of spans folds. The merge is that of online softmax (Milakov and
    Gimelshein, 2018).
    """
    lse = torch.logaddexp(a.lse, b.lse)
    a.out.mul_((a.lse - lse).exp_().unsqueeze(-1))
    a.out.addcmul_(b.out, (b.lse - lse).exp_().unsqueeze(-1).to(a.out.dtype))
    a.lse.copy_(lse)


def attend(
    q: Tensor,  # [batch, tokens, heads, dim]
    k: Tensor,  # [batch, keys, kv_heads, dim]
    v: Tensor,  # [batch, keys, kv_heads, dim]
    *,
    scale: float,
    causal: bool = False,
    offset: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    computed: torch.dtype | None = None,
    into: Attended | None = None,
    merge: bool = False,
) -> Attended:
    """Attention over one span of keys; a query that sees no key has out 0 and lse -inf.

    Args:
        scale: Factor of the scores.
        causal: Whether the keys are the queries' own tokens, which see none after themselves.
        offset: The first query's position minus the first key's, where there is a window.
        window: A query sees only the last `window` positions up to its own; None: all keys.
        softcap: Scores become softcap * tanh(score / softcap).
        computed: The number format of the products; None: that of `q`.
        into: Where to write it.
        merge: Whether `into` holds attention over other keys, with which it is merged.
    """
    computed = computed or q.dtype
    if softcap is None and q.device.type == "cpu" and is_native(computed, q.shape[-1]):
        into = into or empty_like(q)
        native.attend_into(
            *(into.out, into.lse, q, k, v),
            scale=scale,
            computed=computed,
            causal=causal or window is not None,
            offset=offset,
            window=window,
            merge=merge,
        )
        return into
    states, (q, k, v) = q.dtype, (x.to(computed) for x in (q, k, v))
    if causal and window is not None:
        part = _attend_in_blocks(q, k, v, scale=scale, window=window, softcap=softcap)
    else:
        shape = q.shape[1], k.shape[1]
        masked = out_of_window(*shape, offset=offset, window=window, device=q.device)
        part = _attend_masked(q, k, v, scale, causal, masked, softcap)
    part = Attended(part.out.to(states), part.lse)
    if into is None:
        return part
    if merge:
        merge_into(into, part)
    else:
        into.out.copy_(part.out)
        into.lse.copy_(part.lse)
    return into


@cache
@torch.inference_mode()
def is_native(dtype: torch.dtype, dim: int) -> bool:
    """Whether this package's own kernel is here, right and faster than torch's.

    Some milliseconds decide. In a number format it may be three times as far from the definition as
    torch's kernel is.
    """
    if dtype not in native.formats() or dim * dtype.itemsize % 4:
        return False
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, _PROBE_TOKENS, 6, dim, generator=generator)
    k, v = torch.randn(2, 1, _PROBE_TOKENS, 2, dim, generator=generator)
    heads = [x.transpose(1, 2).repeat_interleave(6 // x.shape[2], 1) for x in (q, k, v)]
    expected, _ = _plain(heads[0], heads[1], heads[2], dim**-0.5, True, None)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    own = empty_like(q)

    def attend_natively() -> Tensor:
        native.attend_into(own.out, own.lse, q, k, v, scale=dim**-0.5, computed=dtype, causal=True)
        return own.out

    def attend_by_torch() -> Tensor:
        return _attend_masked(q, k, v, dim**-0.5, True, None, None).out

    ways = {"own": attend_natively, "torch's": attend_by_torch}
    errors = {way: (run() - expected.transpose(1, 2)).abs().max() for way, run in ways.items()}
    seconds = native.least_seconds(ways)
    is_right = bool(errors["own"] <= 3 * errors["torch's"])
    return is_right and seconds["own"] < seconds["torch's"]


def _attend_masked(
    q: Tensor,  # [batch, tokens, heads, dim]
    k: Tensor,  # [batch, keys, kv_heads, dim]
    v: Tensor,  # [batch, keys, kv_heads, dim]
    scale: float,
    causal: bool,
    masked: Tensor | None,  # [tokens, keys] bool: keys that a query does not see
    softcap: float | None,
) -> Attended:
    """By torch's own kernels.

    In a batch of one, grouped heads read their shared keys through a stride of 0, without repeating
    them. In a larger batch, of questions of few tokens, the keys are repeated.
    """
    batch, tokens, heads, dim = q.shape
    _, keys, kv_heads, _ = k.shape
    group = heads // kv_heads
    q = q.view(batch, tokens, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    shared = (batch, kv_heads, group, keys, dim)
    k = k.transpose(1, 2).unsqueeze(2).expand(shared)
    v = v.transpose(1, 2).unsqueeze(2).expand(shared)
    folded = (kv_heads, group) if batch == 1 else (batch, heads)  # of the kernel
    q, k, v = (x.reshape(*folded, x.shape[-2], dim) for x in (q, k, v))
    if q.device.type == "cpu" and softcap is None:
        out, lse = _flash_cpu(q, k, v, scale, causal, masked)
    else:
        out, lse = _plain(q, k, v, scale, causal, masked, softcap)
    out = out.view(batch, -1, *out.shape[1:]).movedim(-2, 1).reshape(batch, tokens, heads, dim)
    lse = lse.view(batch, -1, *lse.shape[1:]).movedim(-1, 1).reshape(batch, tokens, heads)
    if masked is None:
        return Attended(out, lse)
    # The CPU kernel returns lse 0 for a query that sees no key; merged, it would count as one key.
    blind = masked.all(dim=-1, keepdim=True)  # [tokens, 1]
    return Attended(
        out=out.masked_fill(blind.unsqueeze(-1), 0.0), lse=lse.masked_fill(blind, -torch.inf)
    )


def _flash_cpu(
    q: Tensor,  # [batch, heads, tokens, dim]
    k: Tensor,  # [batch, heads, keys, dim]
    v: Tensor,  # [batch, heads, keys, dim]
    scale: float,
    causal: bool,
    masked: Tensor | None,  # [tokens, keys] bool
) -> tuple[Tensor, Tensor]:  # [batch, heads, tokens, dim], [batch, heads, tokens] fp32
    mask = None
    if masked is not None:
        mask = torch.zeros(masked.shape, dtype=q.dtype).masked_fill_(masked, -torch.inf)
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
    masked: Tensor | None,  # [tokens, keys] bool
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
        if masked is not None:
            scores = scores.masked_fill(masked[start:stop], -torch.inf)
        lse = scores.logsumexp(-1)  # [batch, heads, rows]
        weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
        outs.append(weights.to(v.dtype) @ v)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _attend_in_blocks(
    q: Tensor,  # [batch, tokens, heads, dim]
    k: Tensor,  # [batch, tokens, kv_heads, dim]
    v: Tensor,  # [batch, tokens, kv_heads, dim]
    *,
    scale: float,
    window: int,
    softcap: float | None,
) -> Attended:
    """Each query over the last `window` keys up to its own.

    Queries go in blocks, so that a block computes few keys that it cannot see.
    """
    _, tokens, _, _ = q.shape
    parts = []
    for start, stop in pairwise([*range(0, tokens, min(window, _WINDOW_ROWS)), tokens]):
        first = max(0, start - window + 1)
        shape, offset = (stop - start, stop - first), start - first
        masked = out_of_window(*shape, offset=offset, window=window, device=q.device)
        queries, keys, values = q[:, start:stop], k[:, first:stop], v[:, first:stop]
        parts.append(_attend_masked(queries, keys, values, scale, False, masked, softcap))
    return Attended(torch.cat([p.out for p in parts], 1), torch.cat([p.lse for p in parts], 1))


def out_of_window(
    queries: int, keys: int, *, offset: int, window: int | None, device: torch.device
) -> Tensor | None:  # [queries, keys] bool
    """Which keys each query does not see; None without a window.

    `offset` is the position of the first query minus that of the first key.
    """
    if window is None:
        return None
    rows = torch.arange(queries, device=device) + offset
    distance = rows[:, None] - torch.arange(keys, device=device)[None, :]
    return (distance < 0) | (distance >= window)
