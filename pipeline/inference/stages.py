"""A decoder cut between its layers: each part reads the states that the part before it ended in.

The last layer's work is needed at the answers only, so it is done there only; and no layer is
needed that lies deeper than all answers. Knows decoders as transformers builds them. Knows
nothing of trees or tokens.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Stages:
    """A decoder, and two shallow copies of it: all layers but the last, and that one."""

    whole: nn.Module
    body: nn.Module
    last: nn.Module

    def part(self, start: int, stop: int) -> nn.Module:
        """A shallow copy of the layers from `start` to before `stop`; the norm is the last one's.

        So its states are those between the layers, as `hidden_states[stop]` has them.
        """
        layers: Any = self.whole.layers
        assert 0 <= start < stop <= len(layers), f"layers {start} to {stop} of {len(layers)}"
        stage = _with_layers(self.whole, slice(start, stop))
        if stop < len(layers):
            stage.norm = nn.Identity()
        return stage


def cut_last_layer(decoder: nn.Module) -> Stages:
    """The decoder's stages; AttributeError where it is not built of `layers` and a `norm`."""
    layers: Any = decoder.layers
    body = _with_layers(decoder, slice(0, len(layers) - 1))
    body.norm = nn.Identity()
    return Stages(decoder, body, _with_layers(decoder, slice(len(layers) - 1, len(layers))))


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
