"""What a decoder reads of a packed batch of texts and images. Entry point: `batch_inputs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipeline.inference.attention.hook import PrefixKV
from pipeline.inference.attention.tiles import to_device
from pipeline.inference.attention.tree import Tree
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.model.vision import EmbeddedDocument


def batch_inputs(
    model: LoadedModel,
    tree: Tree,
    documents: Sequence[Sequence[int]],
    branch_ids: Sequence[int],  # of one copy of the branches
    prefix: PrefixKV | None,
) -> dict[str, Any]:
    """The arguments of a decoder for all rows: of the documents, and of the branches below.

    A document may be an `EmbeddedDocument`. The arguments are `position_ids` [1, rows], or
    [axes, 1, rows] where images have several; `input_ids` [1, rows] or `inputs_embeds`
    [1, rows, hidden]; and what is added to the rows of images after the first layers (DeepStack,
    Meng et al., 2024).
    """
    pieces = [*documents, *[branch_ids] * len(documents)]
    token_ids = np.concatenate(pieces, dtype=np.int64, casting="unsafe")  # — an empty list is float
    assert len(token_ids) == tree.tokens, f"{len(token_ids)} ids for {tree.tokens} rows"
    positions = tree.positions + (prefix.position_offset if prefix else 0)
    images = {
        n: each.rows for n, each in enumerate(documents) if isinstance(each, EmbeddedDocument)
    }
    if not images:
        ids, places = to_device([token_ids, positions], model.device)
        inputs: dict[str, Any] = {"input_ids": ids.unsqueeze(0)}
        return {**inputs, "position_ids": places.unsqueeze(0), "use_cache": False}
    axes = [len(rows.positions) for rows in images.values() if rows.positions is not None]
    if axes:
        positions = np.tile(positions, (max(axes), 1))
    of_image = np.zeros(tree.tokens, np.bool_)
    places_of_images = list[slice]()
    for number, rows in images.items():
        start, copy = tree.document_starts[number], tree.branch_starts[number]
        image = slice(start, start + len(rows.is_image))
        places_of_images.append(image)
        of_image[image] = rows.is_image
        if rows.positions is not None:
            positions[:, image] = positions[:, start, None] + rows.positions
            text = slice(image.stop, start + len(documents[number]))
            for below in (text, slice(copy, copy + tree.branch_rows)):
                positions[:, below] += rows.offset
    ids, *by_axis = to_device([token_ids, *np.atleast_2d(positions)], model.device)
    places = torch.stack(by_axis) if axes else by_axis[0]
    embeddings = model.network.get_input_embeddings()(ids)
    for image, rows in zip(places_of_images, images.values(), strict=True):
        embeddings[image] = rows.embeddings
    inputs = {"inputs_embeds": embeddings.unsqueeze(0)}
    if deepest := max(len(rows.deep) for rows in images.values()):
        layers = (torch.cat([r.deep[i] for r in images.values()]) for i in range(deepest))
        inputs["visual_pos_masks"] = torch.from_numpy(of_image).to(model.device).unsqueeze(0)
        inputs["deepstack_visual_embeds"] = list(layers)
    return {**inputs, "position_ids": places.unsqueeze(-2), "use_cache": False}
