"""The hook through which transformers' attention layers attend by the tree.

Entry points: `register`, once a process, and `TreeAttention`, one a batch, which travels through
the model's forward as the keyword argument `tree`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from pipeline.errors import ModelError
from pipeline.inference.attention.reference import Attended, LayerKV
from pipeline.inference.attention.rounded_kv import RoundedKV
from pipeline.inference.attention.tiles import Kernel, TilePlan, tile_plan
from pipeline.inference.attention.tree import Tree

IMPLEMENTATION = "assay_tree"


@dataclass(frozen=True, slots=True)
class PrefixKV:
    """The keys and values of a kept span, one entry a layer; every later span views them."""

    layers: Mapping[int, LayerKV | RoundedKV]
    tokens: int
    # The next position minus the number of tokens: below 0 after an image.
    position_offset: int = 0


@dataclass(frozen=True, slots=True)
class TreeAttention:
    """What the attention layers of one forward over a packed tree attend by."""

    tree: Tree
    kernel: Kernel
    prefix: PrefixKV | None = None
    keep: Callable[[int, LayerKV], None] | None = None  # takes every layer's keys and values
    # [answers] int64: rows of branches, the only ones at which the deepest layer is computed; all
    # others give keys and values to it. None: it is computed at all rows.
    answers: Tensor | None = None
    _plans: dict[tuple[int | None, bool], TilePlan] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        q: Tensor,  # [queries, heads, dim]: of all rows, or of the branches
        own: LayerKV,  # of all rows
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        branches_only: bool = False,
    ) -> Attended:
        """The attention of the queries; layers with the same window share one plan."""
        if self.keep is not None:
            self.keep(layer, LayerKV(k=own.k.contiguous(), v=own.v.contiguous()))
        prefix = self.prefix.layers[layer] if self.prefix else None
        if isinstance(prefix, RoundedKV):
            prefix = prefix.widened()
        of = window, branches_only
        if of not in self._plans:
            self._plans[of] = tile_plan(
                self.tree, q.device, window=window, branches_only=branches_only
            )
        return self.kernel(q, own, prefix, self._plans[of], scale, softcap)


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
    s_aux: Tensor | None = None,  # [heads]: the logit of each head's attention sink
    **_unused: Any,
) -> tuple[Tensor, None]:  # [1, tokens, heads, dim]
    """The function that transformers calls in every attention layer."""
    _, _, _, dim = query.shape
    if attention_mask is not None:
        raise ModelError(
            f"{type(module).__name__} builds its own attention mask, which assay does not support; "
            "use another model"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    attended = tree.attend(
        layer,
        query[0].transpose(0, 1),
        LayerKV(k=key[0].transpose(0, 1), v=value[0].transpose(0, 1)),
        scale=dim**-0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    out = attended.out
    if s_aux is not None:
        # — a sink is one more key without a value (Xiao et al., Efficient Streaming Language Models
        # with Attention Sinks, 2023; as learned logits in gpt-oss, OpenAI, 2025)
        share = (attended.lse - torch.logaddexp(attended.lse, s_aux.float())).exp()
        out = (out * share.unsqueeze(-1)).to(out.dtype)
    return out.unsqueeze(0), None


def register() -> None:
    """Make the tree known to transformers; doing it twice changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, _interface)
