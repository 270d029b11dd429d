"""Hidden states of documents at chosen layers: what a trained readout is fitted on.

    prefix  ──  document        ──┬── suffix 0
                its own tokens'   └── suffix 1   the state at each suffix's last token
                mean

Entry point: `document_states`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.errors import ModelError
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules import read_prefix
from pipeline.inference.schedules.batching import pack
from pipeline.inference.schedules.interface import LayerStates, ReadPoint


def document_states(
    model: LoadedModel,
    prefix: Sequence[int],
    suffixes: Sequence[Sequence[int]],  # of one token at least
    documents: Sequence[Sequence[int]],  # of one token at least
    *,
    layers: Sequence[int],  # rising, from 1 to all
    max_batch_tokens: int,
    on_documents: Callable[[int], None] = lambda documents: None,
) -> NDArray[np.float32]:  # [docs, layers, kinds, hidden]
    """The states of every document; kinds are the suffixes' last tokens, then the mean.

    State N is the `hidden_states[N]` of transformers: the residual stream after N layers, and
    after the last one also normalised. Layers above the highest of `layers` are not run.
    `on_documents` gets the number of documents of every batch that is done. ModelError if
    the decoder does not list its layers.
    """
    if not model.layers:
        raise ModelError(
            f"{type(model.decoder).__name__} does not list its layers; use another model"
        )
    points = [ReadPoint(layer, tuple(map(tuple, suffixes)), mean=True) for layer in layers]
    # — run whole: parts of a decoder may have other states between its layers
    whole = replace(model, stages=None)
    reader = read_prefix(whole, prefix, layers=layers[-1]).reader(points)
    lengths = [len(document) + reader.question_tokens for document in documents]
    hidden = model.network.config.get_text_config().hidden_size
    states = np.empty((len(documents), len(layers), len(suffixes) + 1, hidden), np.float32)
    for batch in pack(lengths, max_tokens=max_batch_tokens):
        by_layer: list[LayerStates] = []
        reader.read_layers([documents[i] for i in batch], by_layer.append)
        for number, of_layer in enumerate(by_layer):
            assert of_layer.mean is not None, of_layer.layer
            kinds = torch.cat([of_layer.at_suffixes.float(), of_layer.mean.unsqueeze(0)])
            states[batch, number] = kinds.transpose(0, 1).numpy(force=True)
        on_documents(len(batch))
    return states
