"""Load a causal language model from a local folder, ready for tree attention, or refuse it by name.

Knows folders of safetensors, model families and devices. Knows nothing of prompts, documents, or
where the folder came from. Code that a model folder carries is never run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pipeline.errors import ModelError
from pipeline.inference import attention

_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose attention is the tree's, and the facts the engine needs of it."""

    network: PreTrainedModel
    windows: frozenset[int | None]  # what its layers see: a number of positions, or everything
    context_tokens: int

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def decoder(self) -> nn.Module:
        decoder: nn.Module = self.network.model
        return decoder

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary: [rows, hidden] -> [rows, vocab]."""
        config = self.network.config.get_text_config()
        logits: Tensor = self.network.lm_head(hidden)
        if scaling := getattr(config, "logits_scaling", None):
            logits = logits / scaling
        if scale := getattr(config, "logit_scale", None):
            logits = logits * scale
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer; ModelError if there is none."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: its tokenizer cannot be loaded: {error}") from error


def context_tokens(folder: Path) -> int:
    """The longest prompt that the model in a folder reads."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return int(config.get_text_config().max_position_embeddings)


def load_model(folder: Path, *, dtype: str, device: str) -> LoadedModel:
    """The model in a folder; ModelError names what keeps it from being used."""
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder}: holds no .safetensors file; pickled weights are not read, convert them"
        )
    settings: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(folder, **settings)
        refuse_unmodelled(config)
        network = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=getattr(torch, dtype), use_safetensors=True, **settings
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: cannot be loaded: {error}") from error
    nn.Module.to(network, device)
    return prepare(network)


def prepare(network: PreTrainedModel) -> LoadedModel:
    """The model with tree attention, once a short forward has shown that nothing is lost by it."""
    config = network.config.get_text_config()
    refuse_unmodelled(config)
    attention.register()
    nn.Module.eval(network).requires_grad_(False)
    network.set_attn_implementation(attention.IMPLEMENTATION)
    windows = {
        getattr(module, "sliding_window", None)
        for module in network.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "q_proj")
    }
    return LoadedModel(
        network=network,
        windows=frozenset(windows | {None}),
        context_tokens=int(config.max_position_embeddings),
    )


def refuse_unmodelled(config: Any) -> None:
    """ModelError for a family whose attention does something the tree does not model."""
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    reasons = {
        f"layers of type {unknown}": bool(unknown),
        "attention score soft-capping": bool(getattr(config, "attn_logit_softcapping", None)),
        "bidirectional attention": bool(getattr(config, "use_bidirectional_attention", False)),
        "ALiBi positions": bool(getattr(config, "alibi", False)),
        "an encoder": bool(getattr(config, "is_encoder_decoder", False)),
    }
    found = [reason for reason, present in reasons.items() if present]
    if found:
        raise ModelError(
            f"model family {config.model_type!r} has {', '.join(found)}, which the tree does not "
            "model; use a decoder with full or sliding-window attention"
        )


@contextmanager
def plain_attention(network: PreTrainedModel, implementation: str) -> Iterator[None]:
    """The model as transformers runs it, for the oracle and the baselines."""
    network.set_attn_implementation(implementation)
    try:
        yield
    finally:
        network.set_attn_implementation(attention.IMPLEMENTATION)
