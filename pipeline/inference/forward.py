"""One forward of the model over a packed tree.

Knows token ids, rows and the model. Knows nothing of labels, text or batching.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from pipeline.inference.calls import AttentionPlan, plan_attention, plan_ends
from pipeline.inference.layers import KeptError, LayerKV, PrefixKV, TreeAttention
from pipeline.inference.model import LoadedModel
from pipeline.inference.tree import Tree


def prefill(model: LoadedModel, token_ids: Sequence[int]) -> PrefixKV | None:
    """The keys and values of a span that every later forward reads; None for an empty span."""
    if not token_ids:
        return None
    keep: dict[int, LayerKV] = {}
    tree = Tree.of([len(token_ids)], prefix_tokens=0)
    with torch.inference_mode():
        _run(model.decoder, TreeAttention(_plans(model, tree), keep=keep), tree, ids=token_ids)
    return PrefixKV(keep, tokens=len(token_ids))


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

    `token_ids` are the packed batch's. `ends` rise, and each is the last row of a span.
    """
    assert len(token_ids) == tree.tokens, f"{len(token_ids)} ids for {tree.tokens} rows"
    rows = torch.tensor(
        [tree.branch_start(d) + end for d in range(len(tree.documents)) for end in ends],
        device=model.device,
    )
    attention = TreeAttention(_plans(model, tree), prefix=prefix)
    if model.stages is None:
        states = _run(model.decoder, attention, tree, ids=token_ids)[rows]
    else:
        states = _run(model.stages.body, attention, tree, ids=token_ids)
        states = _last_layer(model, model.stages.last, states, tree, prefix, ends, rows)
    return states.view(len(tree.documents), len(ends), -1)


def _last_layer(
    model: LoadedModel,
    last: nn.Module,
    states: Tensor,  # [tokens, hidden]
    tree: Tree,
    prefix: PrefixKV | None,
    ends: Sequence[int],
    rows: Tensor,  # [docs * ends] int64
) -> Tensor:  # [docs * ends, hidden]
    """The last layer at the ends: of all other rows only its keys and values are needed."""
    keep: dict[int, LayerKV] = {}
    with suppress(KeptError):
        _run(last, TreeAttention({}, keep=keep, only_keep=True), tree, states)
    given = PrefixKV(keep, tokens=tree.tokens)
    plans = {window: plan_ends(tree, ends, window=window) for window in model.windows}
    attention = TreeAttention(plans, prefix=prefix, given=given)
    return _run(last, attention, tree, states[rows], rows=rows)


def _plans(model: LoadedModel, tree: Tree) -> dict[int | None, AttentionPlan]:
    return {window: plan_attention(tree, window=window) for window in model.windows}


def _run(
    decoder: nn.Module,
    attention: TreeAttention,
    tree: Tree,
    states: Tensor | None = None,  # [rows, hidden], in place of token ids
    *,
    ids: Sequence[int] = (),
    rows: Tensor | None = None,  # [rows] int64: which of the tree's rows these are
) -> Tensor:  # [rows, hidden]
    device = next(decoder.parameters()).device
    positions = torch.tensor(tree.positions, device=device)
    read = (
        {"input_ids": torch.tensor([ids], device=device)}
        if states is None
        else {"inputs_embeds": states.unsqueeze(0)}
    )
    output = decoder(
        **read,
        position_ids=(positions if rows is None else positions[rows]).unsqueeze(0),
        use_cache=False,
        tree=attention,
    )
    found: Tensor = output.last_hidden_state[0]
    return found
