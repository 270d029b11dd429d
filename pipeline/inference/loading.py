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
from pipeline.inference.model import LoadedModel, plain_attention
from pipeline.inference.quantisation import quantise
from pipeline.inference.schedules import read_opening
from pipeline.inference.spreading import spread
from pipeline.inference.stages import Stages, cut_last_layer
from pipeline.inference.varlen import Kernel, flash_kernel
from pipeline.spec import Quantize

_STATELESS = {"full_attention", "sliding_attention", "mlp", "moe"}
_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_USABLE = "use a decoder with full or sliding-window attention, or recurrent layers"
# Relative errors that rounding makes; a mask that is wrong makes one near 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
_LONGEST_PROVED_WINDOW = 1_024
_BROKEN = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)


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
    folder: Path, *, dtype: str, device: str, quantize: Quantize = "none", gpus: int = 1
) -> LoadedModel:
    """The model in a folder; ModelError names what keeps it from being used.

    With `gpus` above one, its layers are spread over so many devices of this process.
    """
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
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{folder}: cannot be loaded: {error}") from error
    if gpus > 1:
        spread(network, [f"{device}:{i}" for i in range(gpus)])
        return prepare(network, spread_out=True)
    quantise(network, quantize, device)
    nn.Module.to(network, device)
    return prepare(network)


def prepare(network: PreTrainedModel, *, spread_out: bool = False) -> LoadedModel:
    """The model with tree attention, once short forwards have shown that it answers as before.

    One that is spread over devices runs whole and call by call: a fused plan lies on one device,
    and the hooks that move states between devices are bound to the whole decoder.
    """
    config = network.config.get_text_config()
    refuse_unmodelled(config)
    layers.register()
    # Reported to answer wrongly, and with confidence, behind a cached prefix.
    torch.backends.cuda.enable_cudnn_sdp(False)
    nn.Module.eval(network).requires_grad_(False)
    network.set_attn_implementation(layers.IMPLEMENTATION)
    # Some families keep the window on the attention module, some on the configuration alone.
    windows = {getattr(module, "sliding_window", None) for module in network.modules()}
    recurrent = not _RECURRENT.isdisjoint(_layer_types(config))
    whole = LoadedModel(
        network=network,
        windows=frozenset({*windows, getattr(config, "sliding_window", None), None}),
        context_tokens=int(config.max_position_embeddings),
        stages=None,
        schedule="staged" if recurrent else "fused",
    )
    for model in [whole] if spread_out else _ways(whole):
        try:
            error = tree_error(model)
        except _BROKEN as reason:
            refusal = ModelError(f"{_family(config)} does not run under the tree: {reason!r}")
            refusal.__cause__ = reason
            continue
        if error <= TOLERANCE[network.dtype]:
            return model
        refusal = ModelError(
            f"{_family(config)} answers otherwise under the tree: its states or logits differ by "
            f"{error:.1g} of their size; {_USABLE}"
        )
    raise refusal


def _ways(whole: LoadedModel) -> list[LoadedModel]:
    """How the model may be run, the fastest first."""
    if whole.schedule == "staged":
        return [whole]
    plain = [*_cut(whole), whole]
    kernel = fused_kernel(whole.network)
    return [*(replace(model, kernel=kernel) for model in plain if kernel), *plain]


def fused_kernel(network: PreTrainedModel) -> Kernel | None:
    """The kernel for the network's device and type; None where there is no faster one."""
    half = network.dtype in (torch.bfloat16, torch.float16)
    return flash_kernel() if network.device.type == "cuda" and half else None


def _cut(whole: LoadedModel) -> list[LoadedModel]:
    """The model with its last layer apart, where its decoder is built so that it can be."""
    try:
        stages: Stages = cut_last_layer(whole.decoder)
    except AttributeError:
        return []
    return [replace(whole, stages=stages)]


@torch.inference_mode()
def tree_error(model: LoadedModel) -> float:
    """How far questions' states and logits below a prefix and a document are from independent ones.

    The document is longer than the model's windows, as far as these are short; one question is of
    one token, where a state that was not carried on shows most. The error is relative: the norm
    of the difference over the norm of the states, or of the logits, whichever is more.
    """
    short = [window for window in model.windows if window and window <= _LONGEST_PROVED_WINDOW]
    vocabulary = model.network.config.get_text_config().vocab_size
    ids = [(7_919 * i + 13) % vocabulary for i in range(36 + max(short, default=0))]
    opening, document, questions = ids[:5], ids[12:], (ids[5:8], ids[8:11], ids[11:12])
    states = read_opening(model, opening).ask(questions).states([document])[:, 0]
    with plain_attention(model.network, "eager"):
        alone = [_alone(model, [*opening, *document, *question]) for question in questions]
    expected, logits = (torch.stack(found) for found in zip(*alone, strict=True))
    return max(relative(states, expected), relative(model.unembed(states), logits))


def relative(found: Tensor, expected: Tensor) -> float:
    """Over all rows: half precision sends a token to another expert now and then."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _alone(model: LoadedModel, token_ids: list[int]) -> tuple[Tensor, Tensor]:
    """The last state and its logits as transformers computes them: [hidden] and [vocab]."""
    input_ids = torch.tensor([token_ids], device=model.device)
    state: Tensor = model.decoder(input_ids=input_ids, use_cache=False).last_hidden_state[0, -1]
    output = model.network(input_ids=input_ids, use_cache=False, logits_to_keep=1)
    return state, output.logits[0, -1]


def _family(config: Any) -> str:
    return f"model family {config.model_type!r}"


def refuse_unmodelled(config: Any) -> None:
    """ModelError for a family whose attention does something the tree does not model."""
    unknown = sorted(_layer_types(config) - _STATELESS - _RECURRENT)
    reasons = {
        f"layers of type {unknown}": bool(unknown),
        "bidirectional attention": bool(getattr(config, "use_bidirectional_attention", False)),
        "ALiBi positions": bool(getattr(config, "alibi", False)),
        "an encoder": bool(getattr(config, "is_encoder_decoder", False)),
    }
    found = [reason for reason, present in reasons.items() if present]
    if found:
        raise ModelError(
            f"{_family(config)} has {', '.join(found)}, which the tree does not model; {_USABLE}"
        )


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ())
