"""Attention over the tree by its definition: `attend_plainly`, which needs nothing but torch.

It serves devices and processors without a kernel of this package, and is what the kernels are
compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pipeline.inference.attention.tiles import TilePlan

# Rows of a tile, and its scores, at most: those of 32 heads and more than 32,768 keys would take
# more than 1 GB for 256 rows.
_ROWS, _SCORES = 256, 1 << 28


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The keys and values of one layer."""

    k: Tensor  # [keys, kv_heads, dim]
    v: Tensor  # [keys, kv_heads, dim]

    def followed_by(self, other: LayerKV) -> LayerKV:
        """Both spans, copied."""
        return LayerKV(torch.cat([self.k, other.k]), torch.cat([self.v, other.v]))


@dataclass(frozen=True, slots=True)
class Attended:
    """The attention of some queries."""

    out: Tensor  # [queries, heads, dim]
    lse: Tensor  # [queries, heads] fp32: log of the softmax denominator


def attend_plainly(
    q: Tensor,  # [queries, heads, dim]
    own: LayerKV,  # of the batch's own rows
    prefix: LayerKV | None,
    plan: TilePlan,
    scale: float,
    softcap: float | None,
) -> Attended:
    """Attention by the table of tiles, one after the other. A row sees at least itself."""
    kept = prefix or LayerKV(own.k[:0], own.v[:0])
    stops, positions = plan.subtree_stops, plan.positions
    window = torch.iinfo(torch.int32).max if plan.window is None else plan.window
    longest = len(kept.k) + int(plan.tree.documents.max(initial=0)) + plan.tree.branch_rows
    tile_rows = max(1, min(_ROWS, _SCORES // (q.shape[1] * max(1, longest))))
    outs, lses = [], []
    for first, stop, prefix_first, whole_first, whole_stop, own_first, _ in plan.tiles(
        tile_rows
    ).tolist():
        rows = torch.arange(first, stop, device=q.device)
        below = torch.arange(own_first, stop, device=q.device)
        seen_by_rule = (below <= rows[:, None]) & (rows[:, None] < stops[below])
        before = torch.arange(prefix_first, len(kept.k), device=q.device)
        places = torch.cat([before, positions[whole_first:whole_stop], positions[below]])
        in_window = positions[rows][:, None] - places < window  # [rows, keys]
        in_window[:, len(places) - len(below) :] &= seen_by_rule
        k, v = (
            torch.cat([of_prefix[prefix_first:], x[whole_first:whole_stop], x[own_first:stop]])
            for of_prefix, x in ((kept.k, own.k), (kept.v, own.v))
        )
        queries = q[first - plan.first : stop - plan.first]
        out, lse = _softmax(queries, k, v, in_window, scale, softcap)
        outs.append(out)
        lses.append(lse)
    return Attended(torch.cat(outs), torch.cat(lses))


def _softmax(
    q: Tensor,  # [rows, heads, dim]
    k: Tensor,  # [keys, kv_heads, dim]
    v: Tensor,  # [keys, kv_heads, dim]
    seen: Tensor,  # [rows, keys] bool
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:  # [rows, heads, dim], [rows, heads] fp32
    (_, kv_heads, dim), (_, heads, _) = k.shape, q.shape
    grouped = q.reshape(len(q), kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    scores = (grouped @ k.permute(1, 2, 0).unsqueeze(1)).float() * scale  # [.., rows, keys]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().to(v.dtype)
    out = weights @ v.transpose(0, 1).unsqueeze(1)
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1)
