"""Attention over a tree of spans, merged by log-sum-exp; keys are viewed where they lie.

Knows queries, keys, values and the calls of a plan. Knows nothing of tokens, prompts or models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from pipeline.errors import ModelError
from pipeline.inference.tree import AttentionPlan, Call

IMPLEMENTATION = "assay_tree"


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention over one span of keys, kept in a form that can be merged with another span's."""

    out: Tensor  # [tokens, heads, dim]
    lse: Tensor  # [tokens, heads] fp32: log of the softmax denominator


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The keys and values of one layer for one kept span."""

    k: Tensor  # [keys, kv_heads, dim]
    v: Tensor  # [keys, kv_heads, dim]


@dataclass(frozen=True, slots=True)
class PrefixKV:
    """The keys and values of a kept span, one entry a layer; every later span views them."""

    layers: Mapping[int, LayerKV]
    tokens: int

    @property
    def size_bytes(self) -> int:
        return sum(kv.k.nbytes + kv.v.nbytes for kv in self.layers.values())


@dataclass(frozen=True, slots=True)
class TreeAttention:
    """What a batch's attention needs: travels through the model's forward as one argument."""

    plans: Mapping[int | None, AttentionPlan]  # by the layer's window
    prefix: PrefixKV | None = None
    keep: dict[int, LayerKV] | None = None  # filled with every layer's keys and values


def merge(a: Attended, b: Attended) -> Attended:
    """Attention over both spans at once. Associative, so any number of spans folds."""
    lse = torch.logaddexp(a.lse, b.lse)
    seen = lse.masked_fill(lse == -torch.inf, 0)  # -inf less -inf is no number
    weight_a = (a.lse - seen).exp().unsqueeze(-1)  # [tokens, heads, 1]
    weight_b = (b.lse - seen).exp().unsqueeze(-1)
    out = (a.out * weight_a + b.out * weight_b).to(a.out.dtype)
    return Attended(out=out, lse=lse)


def merge_into(a: Attended, start: int, stop: int, b: Attended) -> None:
    """`merge` of rows start..stop of `a` with `b`, written over those rows of `a`."""
    out, lse_a = a.out[start:stop], a.lse[start:stop]
    lse = torch.logaddexp(lse_a, b.lse)
    out.mul_((lse_a - lse).exp_().unsqueeze(-1))
    out.addcmul_(b.out, (b.lse - lse).exp_().unsqueeze(-1).to(out.dtype))
    lse_a.copy_(lse)


def attend(
    q: Tensor,  # [tokens, heads, dim]
    k: Tensor,  # [keys, kv_heads, dim]
    v: Tensor,  # [keys, kv_heads, dim]
    *,
    scale: float,
    causal: bool = False,
    hidden: Tensor | None = None,  # [tokens, keys] bool: keys a query does not see
) -> Attended:
    """Attention over one span of keys; a query that sees none has out 0 and lse -inf.

    Grouped heads read their shared keys through a stride of 0: nothing is repeated.
    """
    tokens, heads, dim = q.shape
    keys, kv_heads, _ = k.shape
    group = heads // kv_heads
    grouped_q = q.view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3)
    shared = (kv_heads, group, keys, dim)
    kernel = _flash_cpu if q.device.type == "cpu" else _plain
    out, lse = kernel(
        grouped_q,  # [kv_heads, group, tokens, dim]
        k.transpose(0, 1).unsqueeze(1).expand(shared),
        v.transpose(0, 1).unsqueeze(1).expand(shared),
        scale,
        causal,
        hidden,
    )
    attended = Attended(
        out=out.permute(2, 0, 1, 3).reshape(tokens, heads, dim),
        lse=lse.permute(2, 0, 1).reshape(tokens, heads),
    )
    return attended if hidden is None else _blank_unseeing(attended, hidden)


def _flash_cpu(
    q: Tensor,  # [kv_heads, group, tokens, dim]
    k: Tensor,  # [kv_heads, group, keys, dim]
    v: Tensor,  # [kv_heads, group, keys, dim]
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
    q: Tensor,  # [kv_heads, group, tokens, dim]
    k: Tensor,  # [kv_heads, group, keys, dim]
    v: Tensor,  # [kv_heads, group, keys, dim]
    scale: float,
    causal: bool,
    hidden: Tensor | None,  # [tokens, keys] bool
) -> tuple[Tensor, Tensor]:
    """The definition, for devices without a fused kernel here and for the tests."""
    scores = (q @ k.transpose(-1, -2)).float() * scale  # [kv_heads, group, tokens, keys]
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill(future, -torch.inf)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    return (weights.to(v.dtype) @ v), lse


def _blank_unseeing(attended: Attended, hidden: Tensor) -> Attended:
    """The CPU kernel gives such a query lse 0, which would merge as if it had seen keys."""
    blind = hidden.all(dim=-1, keepdim=True)  # [tokens, 1]
    return Attended(
        out=attended.out.masked_fill(blind.unsqueeze(-1), 0.0),
        lse=attended.lse.masked_fill(blind, -torch.inf),
    )


def attend_tree(
    q: Tensor,  # [tokens, heads, dim]
    own: LayerKV,  # of the batch's own tokens
    prefix: LayerKV | None,
    plan: AttentionPlan,
    *,
    scale: float,
) -> Attended:
    """Every row over itself, its span and its ancestors, as the plan says."""
    parts = [_call(q, own, prefix, call, scale) for call in plan.selves]
    whole = parts[0] if len(parts) == 1 else _joined(parts)
    for call in plan.ancestors:
        part = _call(q, own, prefix, call, scale)
        merge_into(whole, call.query_start, call.query_stop, part)
    return whole


def _joined(parts: Sequence[Attended]) -> Attended:
    return Attended(
        out=torch.cat([part.out for part in parts]), lse=torch.cat([part.lse for part in parts])
    )


def _call(
    q: Tensor,  # [tokens, heads, dim]
    own: LayerKV,
    prefix: LayerKV | None,
    call: Call,
    scale: float,
) -> Attended:
    source = prefix if call.from_prefix else own
    assert source is not None, f"{call} reads a prefix and the batch has none"
    return attend(
        q[call.query_start : call.query_stop],
        source.k[call.key_start : call.key_stop],
        source.v[call.key_start : call.key_stop],
        scale=scale,
        causal=call.causal,
        hidden=_hidden(call, q.device),
    )


def _hidden(call: Call, device: torch.device) -> Tensor | None:
    """Which keys each query does not see: [queries, keys] bool."""
    if call.window is None:
        return None
    queries = torch.arange(call.query_stop - call.query_start, device=device)
    keys = torch.arange(call.key_stop - call.key_start, device=device)
    distance = (queries + call.query_position)[:, None] - (keys + call.key_position)[None, :]
    return (distance < 0) | (distance >= call.window)


def _interface(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, dim]
    key: Tensor,  # [1, kv_heads, tokens, dim]
    value: Tensor,  # [1, kv_heads, tokens, dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    tree: TreeAttention,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every attention layer."""
    _, heads, tokens, dim = query.shape
    extras = {
        "score soft-capping": softcap,
        "attention sinks": s_aux,
        "a mask of its own": attention_mask,
    }
    unmodelled = [name for name, value in extras.items() if value is not None]
    if unmodelled:
        what = " and ".join(unmodelled)
        raise ModelError(f"{type(module).__name__}: {what} is not modelled; use another model")
    layer: int = module.layer_idx  # type: ignore[assignment]
    own = LayerKV(k=key[0].transpose(0, 1), v=value[0].transpose(0, 1))
    if tree.keep is not None:
        tree.keep[layer] = LayerKV(k=own.k.contiguous(), v=own.v.contiguous())
    attended = attend_tree(
        query[0].transpose(0, 1),  # [tokens, heads, dim]
        own,
        tree.prefix.layers[layer] if tree.prefix else None,
        tree.plans[sliding_window],
        scale=dim**-0.5 if scaling is None else scaling,
    )
    return attended.out.reshape(1, tokens, heads, dim), None


def register() -> None:
    """Make the tree known to transformers; doing it twice changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, _interface)
