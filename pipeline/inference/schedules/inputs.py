"""What a decoder reads of a packed batch of texts and images. Entry point: `batch_inputs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.inference.attention.hook import PrefixKV, TreeAttention
from pipeline.inference.attention.tiles import to_device
from pipeline.inference.attention.tree import Tree
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.model.vision import EmbeddedDocument


def packed(
    attention: TreeAttention,
    positions: Tensor,  # [rows] or [axes, rows] int64
    **inputs: Any,  # input_ids [rows] int64 or inputs_embeds [rows, hidden], and others
) -> dict[str, Any]:
    """The arguments of a decoder, or of a part of one, for one packed batch."""
    return {
        **{n: x.unsqueeze(0) if isinstance(x, Tensor) else x for n, x in inputs.items()},
        "position_ids": positions.unsqueeze(-2),
        "use_cache": False,
        "tree": attention,
    }


def batch_inputs(
    model: LoadedModel,
    tree: Tree,
    documents: Sequence[Sequence[int]],
    branch_ids: Sequence[int],  # of one copy of the branches
    prefix: PrefixKV | None,
) -> tuple[Tensor, dict[str, Any]]:
    """The positions and other inputs of all rows: of the documents, and of the branches below.

    A document may be an `EmbeddedDocument`. Positions are [rows], or [axes, rows] where images have
    several. Inputs are `input_ids` [rows] or `inputs_embeds` [rows, hidden], and what is added to
    the rows of images after the first layers (DeepStack, Meng et al., 2024).
    """
    pieces = [*documents, *[branch_ids] * len(documents)]
    token_ids = np.concatenate(pieces, dtype=np.int64, casting="unsafe")  # — an empty list is float
    assert len(token_ids) == tree.tokens, f"{len(token_ids)} ids for {tree.tokens} rows"
    positions = tree.positions + (prefix.position_offset if prefix else 0)
    images = {
        number: document
        for number, document in enumerate(documents)
        if isinstance(document, EmbeddedDocument)
    }
    if not images:
        ids, places = to_device([token_ids, positions], model.device)
        return places, {"input_ids": ids}
    axes = [len(each.positions) for each in images.values() if each.positions is not None]
    if axes:
        positions = np.tile(positions, (max(axes), 1))
    starts, below = tree.document_starts, tree.branch_starts
    of_image = np.zeros(tree.tokens, np.bool_)
    for number, rows in images.items():
        own = slice(starts[number], starts[number] + len(rows))
        of_image[own] = rows.is_image
        if rows.positions is not None:
            positions[:, own] = positions[:, own.start, None] + rows.positions
            copy = slice(below[number], below[number] + tree.branch_rows)
            positions[:, copy] += rows.end - len(rows)
    ids, *by_axis = to_device([token_ids, *np.atleast_2d(positions)], model.device)
    places = torch.stack(by_axis) if axes else by_axis[0]
    embeddings = model.network.get_input_embeddings()(ids)
    for number, rows in images.items():
        embeddings[starts[number] : starts[number] + len(rows)] = rows.embeddings
    inputs: dict[str, Any] = {"inputs_embeds": embeddings}
    if deepest := max(len(rows.deep) for rows in images.values()):
        layers = (torch.cat([r.deep[i] for r in images.values()]) for i in range(deepest))
        inputs["visual_pos_masks"] = torch.from_numpy(of_image).to(model.device)
        inputs["deepstack_visual_embeds"] = list(layers)
    return places, inputs
