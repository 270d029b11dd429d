"""One forward of the model over a packed tree.

Knows token ids, rows and the model. Knows nothing of labels, text or batching.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.inference.attention import LayerKV, PrefixKV, TreeAttention
from pipeline.inference.model import LoadedModel
from pipeline.inference.tree import Node, Tree, plan_attention


def prefill(model: LoadedModel, token_ids: Sequence[int]) -> PrefixKV | None:
    """The keys and values of a span that every later forward reads; None for an empty span."""
    if not token_ids:
        return None
    keep: dict[int, LayerKV] = {}
    tree = Tree.of([Node(len(token_ids))], prefix_tokens=0)
    _decode(model, token_ids, tree, prefix=None, keep=keep)
    return PrefixKV(keep, tokens=len(token_ids))


def hidden_states(
    model: LoadedModel,
    token_ids: Sequence[int],
    tree: Tree,
    *,
    prefix: PrefixKV | None,
    rows: Tensor,  # [rows] int64
) -> Tensor:  # [rows, hidden]
    """The last layer's normalised states at the given rows of the packed batch."""
    states = _decode(model, token_ids, tree, prefix=prefix, keep=None)
    return states[rows]


@torch.inference_mode()
def _decode(
    model: LoadedModel,
    token_ids: Sequence[int],
    tree: Tree,
    *,
    prefix: PrefixKV | None,
    keep: dict[int, LayerKV] | None,
) -> Tensor:  # [tokens, hidden]
    assert len(token_ids) == tree.tokens, f"{len(token_ids)} ids for {tree.tokens} rows"
    plans = {window: plan_attention(tree, window=window) for window in model.windows}
    output = model.decoder(
        input_ids=torch.tensor([token_ids], device=model.device),
        position_ids=torch.tensor([tree.positions], device=model.device),
        use_cache=False,
        tree=TreeAttention(plans=plans, prefix=prefix, keep=keep),
    )
    states: Tensor = output.last_hidden_state[0]
    return states
