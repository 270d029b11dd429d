"""One forward of the model over a packed tree.

Knows token ids, rows and the model. Knows nothing of labels, text or batching.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.inference.attention.compiled import CompiledPlan, compile_plans, to_device
from pipeline.inference.attention.hook import KeptError, PrefixKV, TreeAttention
from pipeline.inference.attention.kernels import LayerKV
from pipeline.inference.attention.plan import AttentionPlan, plan_attention, plan_ends
from pipeline.inference.attention.tree import Tree
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.hooks import states_at

Plans = Mapping[int | None, AttentionPlan]  # by the layer's window


@torch.inference_mode()
def prefill(
    model: LoadedModel,
    token_ids: Sequence[int],
    *,
    prefix: PrefixKV | None = None,
    layers: int | None = None,
) -> PrefixKV | None:
    """The keys and values of a span that every later forward reads; None for an empty span.

    Below a kept prefix, of both together: the prefix's are copied once. Of all layers, or of the
    first `layers` where no later forward goes deeper.
    """
    if not token_ids:
        return prefix
    keep: dict[int, LayerKV] = {}
    tree = Tree.of([len(token_ids)], prefix_tokens=prefix.tokens if prefix else 0)
    plans = everywhere(model, tree)
    attention = TreeAttention(plans, prefix, keep=keep, compiled=compiled(model, plans))
    ids, positions = to_device([np.array(token_ids), tree.positions], model.device)
    if layers is None:
        run(model.decoder, attention, positions, input_ids=ids)
    elif model.stages is None:
        states_at(model.decoder, [layers], **packed(attention, positions, input_ids=ids))
    else:
        run(model.stages.part(0, layers), attention, positions, input_ids=ids)
    own = PrefixKV(keep, tokens=len(token_ids))
    return prefix.followed_by(own) if prefix else own


@torch.inference_mode()
def end_states(
    model: LoadedModel,
    token_ids: Sequence[int],
    tree: Tree,
    *,
    prefix: PrefixKV | None,
    ends: Sequence[int],
) -> Tensor:  # [docs, ends, hidden]
    """The last layer's normalised states at rows `ends` of every document's branches.

    `token_ids` are the packed batch's. `ends` rise.
    """
    assert len(token_ids) == tree.tokens, f"{len(token_ids)} ids for {tree.tokens} rows"
    ids, positions, rows = to_device(
        [np.array(token_ids), tree.positions, tree.rows_at(ends)], model.device
    )
    plans = everywhere(model, tree)
    attention = TreeAttention(plans, prefix, compiled=compiled(model, plans))
    if model.stages is None:
        states = run(model.decoder, attention, positions, input_ids=ids)[rows]
        return states.view(len(tree.documents), len(ends), -1)
    states = run(model.stages.body, attention, positions, input_ids=ids)
    return at_ends(model, model.stages.last, tree, states, positions, rows, prefix, ends)


def at_ends(
    model: LoadedModel,
    layer: nn.Module,
    tree: Tree,
    states: Tensor,  # [rows, hidden]
    positions: Tensor,  # [rows] int64
    rows: Tensor,  # [docs * ends] int64: where the ends are
    prefix: PrefixKV | None,
    ends: Sequence[int],
) -> Tensor:  # [docs, ends, hidden]
    """One layer's states at the ends: of all other rows it takes the keys and values alone."""
    keep: dict[int, LayerKV] = {}
    with suppress(KeptError):
        kept = TreeAttention({}, keep=keep, only_keep=True)
        run(layer, kept, positions, inputs_embeds=states)
    cut = tree.cut_behind(ends)
    plans = {window: plan_ends(cut, ends, window=window) for window in model.windows}
    given = PrefixKV(keep, tokens=tree.tokens)
    attention = TreeAttention(plans, prefix, given=given, compiled=compiled(model, plans))
    states = run(layer, attention, positions[rows], inputs_embeds=states[rows])
    return states.view(len(tree.documents), len(ends), -1)


def everywhere(model: LoadedModel, tree: Tree) -> Plans:
    """The plans for a layer that is asked at every row."""
    return {window: plan_attention(tree, window=window) for window in model.windows}


def compiled(model: LoadedModel, plans: Plans) -> dict[int | None, CompiledPlan] | None:
    """Made when a stage is about to run: a device works on the stage before it meanwhile."""
    return compile_plans(plans, model.device, model.kernel) if model.kernel else None


def run(
    decoder: nn.Module,
    attention: TreeAttention,
    positions: Tensor,  # [rows] int64
    **read: Tensor,  # input_ids [rows] int64 or inputs_embeds [rows, hidden]
) -> Tensor:  # [rows, hidden]
    """The states that a decoder, or a part of one, ends in."""
    output = decoder(**packed(attention, positions, **read))
    found: Tensor = output.last_hidden_state[0]
    return found


def packed(attention: TreeAttention, positions: Tensor, **read: Tensor) -> dict[str, Any]:
    """What a decoder is called with for one packed batch."""
    return {
        **{name: tensor.unsqueeze(0) for name, tensor in read.items()},
        "position_ids": positions.unsqueeze(0),
        "use_cache": False,
        "tree": attention,
    }
