"""A decoder cut in two: all layers but the last, and the last with the final norm.

The last layer's work is needed at the answers only, so it is done there only. Knows decoders as
transformers builds them. Knows nothing of trees or tokens.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Stages:
    """Two shallow copies of a decoder, with its weights; the second reads the first's states."""

    body: nn.Module
    last: nn.Module


def cut_last_layer(decoder: nn.Module) -> Stages:
    """The decoder's stages; AttributeError where it is not built of `layers` and a `norm`."""
    layers: Any = decoder.layers
    body = _with_layers(decoder, slice(0, len(layers) - 1))
    body.norm = nn.Identity()
    return Stages(body, _with_layers(decoder, slice(len(layers) - 1, len(layers))))


def _with_layers(decoder: nn.Module, chosen: slice) -> nn.Module:
    """A decoder of these layers, whose configuration says so: some families count by it."""
    stage = copy.copy(decoder)
    stage._modules = dict(decoder._modules)
    layers: Any = decoder.layers
    config: Any = copy.copy(decoder.config)
    stage.layers = nn.ModuleList(layers[chosen])
    config.num_hidden_layers = len(stage.layers)
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types)[chosen]
    stage.config = config
    return stage
