"""The attention of a decoder layer over a tree; keys are viewed where they lie.

Knows plans, kept prefixes and what transformers hands to an attention function. Knows nothing of
tokens, prompts or labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from pipeline.errors import ModelError
from pipeline.inference.attention.kernels import (
    Attended,
    attend,
    attend_causally,
    merge_into,
    out_of_window,
)
from pipeline.inference.attention.plan import AttentionPlan, Call, Rows

IMPLEMENTATION = "assay_tree"


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The keys and values of one layer for one span, or for copies of it where that is said."""

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

    def followed_by(self, other: PrefixKV) -> PrefixKV:
        """Both spans as one."""
        pairs = ((layer, kv, other.layers[layer]) for layer, kv in self.layers.items())
        joined = {
            layer: LayerKV(torch.cat([kv.k, below.k]), torch.cat([kv.v, below.v]))
            for layer, kv, below in pairs
        }
        return PrefixKV(joined, self.tokens + other.tokens)


class CompiledPlan(Protocol):
    """A plan made ready for the device."""

    def attend(
        self,
        q: Tensor,  # [tokens, heads, dim]
        own: LayerKV,
        prefix: LayerKV | None,
        *,
        scale: float,
    ) -> Attended:  # of one copy
        """What `attend_tree` gives for the plan."""


class LayerAttention(Protocol):
    """What a batch's attention needs: travels through the model's forward as one argument."""

    def attend(
        self,
        layer: int,
        q: Tensor,  # [copies, tokens, heads, dim]
        own: LayerKV,  # of the same tokens: [copies, tokens, kv_heads, dim]
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Attended: ...


@dataclass(frozen=True, slots=True)
class TreeAttention:
    """Attention over a packed tree."""

    plans: Mapping[int | None, AttentionPlan]  # by the layer's window
    prefix: PrefixKV | None = None
    keep: dict[int, LayerKV] | None = None  # filled with every layer's keys and values
    given: PrefixKV | None = None  # read in place of the batch's own keys and values
    only_keep: bool = False  # the layer is left once it has been kept
    compiled: Mapping[int | None, CompiledPlan] | None = None  # the plans, for a fused kernel

    def attend(
        self,
        layer: int,
        q: Tensor,  # [1, tokens, heads, dim]
        own: LayerKV,  # [1, tokens, kv_heads, dim]
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Attended:
        packed = LayerKV(k=own.k[0], v=own.v[0])
        if self.keep is not None:
            self.keep[layer] = LayerKV(k=packed.k.contiguous(), v=packed.v.contiguous())
            if self.only_keep:
                raise KeptError
        read = self.given.layers[layer] if self.given else packed
        prefix = self.prefix.layers[layer] if self.prefix else None
        if self.compiled is not None and softcap is None:
            return self.compiled[window].attend(q[0], read, prefix, scale=scale)
        return attend_tree(q[0], read, prefix, self.plans[window], scale=scale, softcap=softcap)


class KeptError(Exception):
    """Leaves a layer whose keys and values are all that was wanted of it."""


def attend_tree(
    q: Tensor,  # [tokens, heads, dim]
    own: LayerKV,  # of the batch's own tokens
    prefix: LayerKV | None,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float | None = None,
) -> Attended:  # of one copy
    """Every row over its span and its ancestors, as the plan says."""
    tokens, heads, _ = q.shape
    first, *others = plan.levels
    if len(first) == 1 and first[0].queries.tokens == tokens:
        whole = attend_call(q, own, prefix, first[0], scale=scale, softcap=softcap)
    else:
        out = q.new_empty(1, *q.shape)
        whole = Attended(out, out.new_empty(1, tokens, heads, dtype=torch.float32))
        for call in first:
            part = attend_call(q, own, prefix, call, scale=scale, softcap=softcap)
            asked = of_rows(whole, call.queries)
            asked.out.copy_(part.out)
            asked.lse.copy_(part.lse)
    for call in (call for level in others for call in level):
        part = attend_call(q, own, prefix, call, scale=scale, softcap=softcap)
        merge_into(of_rows(whole, call.queries), part)
    return whole


def attend_call(
    q: Tensor,  # [tokens, heads, dim]
    own: LayerKV,
    prefix: LayerKV | None,
    call: Call,
    *,
    scale: float,
    softcap: float | None = None,
) -> Attended:
    """One call of a plan: its queries alone, copy by copy."""
    source = prefix if call.from_prefix else own
    assert source is not None, f"{call} reads a prefix and the batch has none"
    queries = view_rows(q, call.queries)
    keys, values = view_rows(source.k, call.keys), view_rows(source.v, call.keys)
    if call.causal:
        return attend_causally(
            queries, keys, values, scale=scale, window=call.window, softcap=softcap
        )
    hidden = None
    if call.window is not None:
        hidden = out_of_window(
            call.queries.tokens,
            call.keys.tokens,
            offset=call.offset,
            window=call.window,
            device=q.device,
        )
    return attend(queries, keys, values, scale=scale, hidden=hidden, softcap=softcap)


def view_rows(x: Tensor, rows: Rows) -> Tensor:
    """[tokens, ...] -> [copies, rows, ...], never copied."""
    if rows.copies == 1:
        return x[rows.start : rows.stop].unsqueeze(0)
    return x[rows.start :].unfold(0, rows.tokens, rows.stride).movedim(-1, 1)


def of_rows(whole: Attended, rows: Rows) -> Attended:
    """The rows of one copy, as the copies that they are of each other, never copied."""
    return Attended(view_rows(whole.out[0], rows), view_rows(whole.lse[0], rows))


def _interface(
    module: nn.Module,
    query: Tensor,  # [copies, heads, tokens, dim]
    key: Tensor,  # [copies, kv_heads, tokens, dim]
    value: Tensor,  # [copies, kv_heads, tokens, dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    tree: LayerAttention,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [heads]: what each head's softmax counts beside the keys
    **_unused: Any,
) -> tuple[Tensor, None]:  # [copies, tokens, heads, dim]
    """The function transformers calls in every attention layer."""
    dim = query.shape[-1]
    if attention_mask is not None:
        raise ModelError(
            f"{type(module).__name__}: a mask of its own is not modelled; use another model"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    attended = tree.attend(
        layer,
        query.transpose(1, 2),
        LayerKV(k=key.transpose(1, 2), v=value.transpose(1, 2)),
        scale=dim**-0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    if s_aux is not None:
        attended = drain(attended, s_aux)
    return attended.out.contiguous(), None


def drain(
    attended: Attended,
    sinks: Tensor,  # [heads]
) -> Attended:
    """Attention whose softmax also counts one sink a head, which has no value.

    Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023.
    """
    lse = torch.logaddexp(attended.lse, sinks.float())
    weight = (attended.lse - lse).exp().unsqueeze(-1)
    return Attended((attended.out * weight).to(attended.out.dtype), lse)


def register() -> None:
    """Make the tree known to transformers; doing it twice changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, _interface)
