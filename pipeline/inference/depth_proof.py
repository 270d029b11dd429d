"""That a model's states after some layers are those of the model as transformers runs it.

Knows a loaded model and its layers. Knows nothing of readouts, documents or labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.inference.depths import Depth
from pipeline.inference.loading import TOLERANCE, relative
from pipeline.inference.model import LoadedModel, plain_attention
from pipeline.inference.schedules import read_opening


def proved_at(model: LoadedModel, layers: Sequence[int]) -> LoadedModel:
    """The model, run in parts or whole, once a short forward has shown its states there.

    ModelError where neither gives them: layers of some families read more than the one before.
    """
    ways = [model] if model.stages is None else [model, replace(model, stages=None)]
    errors = []
    for way in ways:
        errors.append(_depth_error(way, sorted(set(layers))))
        if errors[-1] <= TOLERANCE[model.network.dtype]:
            return way
    raise ModelError(
        f"model family {model.network.config.model_type!r} has other states between its layers "
        f"than transformers gives: they differ by {min(errors):.1g} of their size after the "
        f"layers {sorted(set(layers))}; use readouts of its last layer"
    )


@torch.inference_mode()
def _depth_error(model: LoadedModel, layers: Sequence[int]) -> float:
    """How far the states lie apart, relative to their norm, at the layer where they do most."""
    vocabulary = model.network.config.get_text_config().vocab_size
    ids = [(7_919 * i + 13) % vocabulary for i in range(24)]
    opening, below, document = ids[:3], tuple(ids[3:6]), ids[6:]
    found: dict[int, Tensor] = {}

    def take(depth: Depth, states: Sequence[Tensor]) -> None:
        found[depth.layer] = torch.stack([place[0].float() for place in states])

    depths = [Depth(layer, (below, None)) for layer in layers]
    read_opening(model, opening, layers=max(layers)).look(depths).descend([document], take)
    with plain_attention(model.network, "eager"):
        output = model.decoder(
            input_ids=torch.tensor([[*opening, *document, *below]], device=model.device),
            use_cache=False,
            output_hidden_states=True,
        )
    own = slice(len(opening), len(opening) + len(document))
    errors = []
    for layer in layers:
        states = output.hidden_states[layer][0].float()
        alone = torch.stack([states[-1], states[own].mean(dim=0)])
        errors.append(relative(found[layer], alone))
    return max(errors)
