"""A causal language model that attends by the tree, and the way back to plain attention.

Knows a loaded model and what the engine needs of it. Knows nothing of files or families.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.inference import layers
from pipeline.inference.stages import Stages
from pipeline.inference.varlen import Kernel


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
        layers: nn.ModuleList = self.decoder.layers  # type: ignore[assignment]
        return len(layers)

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
