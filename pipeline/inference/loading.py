"""Load a causal language model from a local folder, ready for tree attention, or refuse it by name.

Knows folders of safetensors, model families and devices. Knows nothing of prompts, documents, or
where the folder came from. Code that a model folder carries is never run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pipeline.errors import ModelError
from pipeline.inference import layers
from pipeline.inference.forward import end_states, prefill
from pipeline.inference.model import LoadedModel, plain_attention
from pipeline.inference.quantisation import quantise
from pipeline.inference.stages import Stages, cut_last_layer
from pipeline.inference.tree import Node, Tree
from pipeline.spec import Quantize

_LAYERS = {"full_attention", "sliding_attention"}
# Relative errors that rounding makes; a mask that is wrong makes one near 1.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
_LONGEST_PROVED_WINDOW = 1_024
_BROKEN = (AttributeError, IndexError, KeyError, TypeError, RuntimeError)


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


def load_model(
    folder: Path, *, dtype: str, device: str, quantize: Quantize = "none"
) -> LoadedModel:
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
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"{folder}: cannot be loaded: {error}") from error
    quantise(network, quantize, device)
    nn.Module.to(network, device)
    return prepare(network)


def prepare(network: PreTrainedModel) -> LoadedModel:
    """The model with tree attention, once short forwards have shown that it answers as before."""
    config = network.config.get_text_config()
    refuse_unmodelled(config)
    layers.register()
    nn.Module.eval(network).requires_grad_(False)
    network.set_attn_implementation(layers.IMPLEMENTATION)
    # Some families keep the window on the attention module, some on the configuration alone.
    windows = {getattr(module, "sliding_window", None) for module in network.modules()}
    whole = LoadedModel(
        network=network,
        windows=frozenset({*windows, getattr(config, "sliding_window", None), None}),
        context_tokens=int(config.max_position_embeddings),
        stages=None,
    )
    for model in (*_cut(whole), whole):
        try:
            error = tree_error(model)
        except _BROKEN as reason:
            refusal = ModelError(f"{_family(config)} does not run under the tree: {reason!r}")
            refusal.__cause__ = reason
            continue
        if error <= _TOLERANCE[network.dtype]:
            return model
        refusal = ModelError(
            f"{_family(config)} answers otherwise under the tree: its states differ by {error:.1g} "
            "of their size; use a decoder with full or sliding-window attention"
        )
    raise refusal


def _cut(whole: LoadedModel) -> list[LoadedModel]:
    """The model with its last layer apart, where its decoder is built so that it can be."""
    try:
        stages: Stages = cut_last_layer(whole.decoder)
    except AttributeError:
        return []
    return [replace(whole, stages=stages)]


@torch.inference_mode()
def tree_error(model: LoadedModel) -> float:
    """How far two questions' states below a prefix and a document are from independent prompts'.

    The document is longer than the model's windows, as far as these are short. The error is
    relative: the norm of the difference over the norm of the states.
    """
    short = [window for window in model.windows if window and window <= _LONGEST_PROVED_WINDOW]
    vocabulary = model.network.config.get_text_config().vocab_size
    ids = [(7_919 * i + 13) % vocabulary for i in range(35 + max(short, default=0))]
    opening, document, questions = ids[:5], ids[11:], (ids[5:8], ids[8:11])
    tree = Tree.of([len(document)], (Node(3), Node(3)), prefix_tokens=len(opening))
    packed = [*document, *questions[0], *questions[1]]
    states = end_states(model, packed, tree, prefix=prefill(model, opening), ends=[2, 5])[0]
    with plain_attention(model.network, "eager"):
        alone = [_last_state(model, [*opening, *document, *question]) for question in questions]
    expected = torch.stack(alone).float()
    return float((states.float() - expected).norm() / expected.norm())


def _last_state(model: LoadedModel, token_ids: list[int]) -> Tensor:
    input_ids = torch.tensor([token_ids], device=model.device)
    state: Tensor = model.decoder(input_ids=input_ids, use_cache=False).last_hidden_state[0, -1]
    return state


def _family(config: Any) -> str:
    return f"model family {config.model_type!r}"


def refuse_unmodelled(config: Any) -> None:
    """ModelError for a family whose attention does something the tree does not model."""
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    reasons = {
        f"layers of type {unknown}": bool(unknown),
        "bidirectional attention": bool(getattr(config, "use_bidirectional_attention", False)),
        "ALiBi positions": bool(getattr(config, "alibi", False)),
        "an encoder": bool(getattr(config, "is_encoder_decoder", False)),
    }
    found = [reason for reason, present in reasons.items() if present]
    if found:
        raise ModelError(
            f"{_family(config)} has {', '.join(found)}, which the tree does not "
            "model; use a decoder with full or sliding-window attention"
        )
