"""What a decoder reads of a packed batch of texts and images. Entry point: `batch_inputs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.inference.attention.compiled import to_device
from pipeline.inference.attention.hook import PrefixKV
from pipeline.inference.attention.tree import Tree
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.model.vision import ImageRows


@dataclass(frozen=True, slots=True)
class DeepRows:
    """What is added to the rows of images after the first layers of a decoder."""

    is_image: Tensor | None = None  # [rows] bool; None: nothing is added
    by_layer: tuple[Tensor, ...] = ()  # [image rows, hidden]

    def of_rows(self, rows: Tensor) -> DeepRows:
        """The same of these rows of the batch, rising within each document."""
        if self.is_image is None:
            return self
        chosen = self.is_image[rows]
        places = (self.is_image.long().cumsum(0) - 1)[rows[chosen]]
        return DeepRows(chosen, tuple(of_layer[places] for of_layer in self.by_layer))

    def from_layer(self, start: int) -> dict[str, object]:
        """The arguments of a part of the decoder that begins with this layer."""
        if self.is_image is None or start >= len(self.by_layer):
            return {}
        return {
            "visual_pos_masks": self.is_image.unsqueeze(0),
            "deepstack_visual_embeds": list(self.by_layer[start:]),
        }


NOTHING_DEEP = DeepRows()


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """The inputs of all rows of a batch."""

    positions: Tensor  # [rows] int64; [axes, rows] where images have several
    rows: dict[str, Tensor]  # `input_ids` [rows] or `inputs_embeds` [rows, hidden]
    deep: DeepRows = NOTHING_DEEP


def batch_inputs(
    model: LoadedModel,
    tree: Tree,
    documents: Sequence[Sequence[int]],
    branch_ids: Sequence[int],  # of one copy of the branches
    prefix: PrefixKV | None,
) -> BatchInputs:
    """The inputs of these documents, which may be `ImageRows`, and of the branches below each."""
    of_documents = [token for document in documents for token in document]
    token_ids = np.array([*of_documents, *list(branch_ids) * len(documents)], np.int64)
    assert len(token_ids) == tree.tokens, f"{len(token_ids)} ids for {tree.tokens} rows"
    positions = tree.positions + (prefix.shift if prefix else 0)
    images = {
        number: document
        for number, document in enumerate(documents)
        if isinstance(document, ImageRows)
    }
    if not images:
        ids, places = to_device([token_ids, positions], model.device)
        return BatchInputs(places, {"input_ids": ids})
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
    deepest = max(len(rows.deep) for rows in images.values())
    deep = NOTHING_DEEP
    if deepest:
        is_image = torch.from_numpy(of_image).to(model.device)
        layers = (torch.cat([r.deep[i] for r in images.values()]) for i in range(deepest))
        deep = DeepRows(is_image, tuple(layers))
    return BatchInputs(places, {"inputs_embeds": embeddings}, deep)
