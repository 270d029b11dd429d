"""A causal language model that attends by the tree, and the way back to plain attention.

Knows a loaded model and what the engine needs of it. Knows nothing of files or families.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.inference.attention import hook as layers
from pipeline.inference.attention.varlen import Kernel


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose attention is the tree's, and the facts the engine needs of it."""

    network: PreTrainedModel
    windows: frozenset[int | None]  # what its layers see: a number of positions, or everything
    context_tokens: int
    stages: Stages | None  # None where the decoder cannot be cut before its last layer
    schedule: Literal["fused", "staged"]  # staged where layers carry a recurrent state
    kernel: Kernel | None = None  # None where plans are run call by call

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def decoder(self) -> nn.Module:
        decoder: nn.Module = self.network.model
        return decoder

    @property
    def layers(self) -> int:
        """How many layers the decoder has; 0 if it does not list them: only its end can be read."""
        layers = getattr(self.decoder, "layers", None)
        return len(layers) if isinstance(layers, nn.ModuleList) else 0

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary: [rows, hidden] -> [rows, vocab]."""
        config = self.network.config.get_text_config()
        logits: Tensor = self.network.lm_head(hidden)
        if scaling := getattr(config, "logits_scaling", None):
            logits = logits / scaling
        for name in ("logit_scale", "lm_head_multiplier"):
            if scale := getattr(config, name, None):
                logits = logits * scale
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits


@contextmanager
def plain_attention(network: PreTrainedModel, implementation: str) -> Iterator[None]:
    """The model as transformers runs it, for the oracle and the baselines."""
    network.set_attn_implementation(implementation)
    try:
        yield
    finally:
        network.set_attn_implementation(layers.IMPLEMENTATION)


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
        if (start, stop) == (0, len(layers) - 1):
            return self.body
        if (start, stop) == (len(layers) - 1, len(layers)):
            return self.last
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
