"""Load a causal language model from a local folder, ready for tree attention, or refuse it by name.

Knows folders of safetensors, model families and devices. Knows nothing of prompts, documents, or
where the folder came from. Code that a model folder carries is never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model
from huggingface_hub.errors import StrictDataclassError
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
from pipeline.inference.attention import hook as layers
from pipeline.inference.attention.varlen import Kernel, flash_kernel
from pipeline.inference.model.loaded import LoadedModel, Stages, cut_last_layer, plain_attention
from pipeline.inference.model.quantisation import quantise
from pipeline.inference.schedules.interface import Depth
from pipeline.inference.schedules.select import read_prefix
from pipeline.spec.schema import Quantize

_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
_STATELESS = {"full_attention", "sliding_attention", "mlp", "moe"}
_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_USABLE = "use a decoder with full or sliding-window attention, or recurrent layers"
# Relative errors that rounding makes; a mask that is wrong makes one near 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
_LONGEST_PROVED_WINDOW = 1_024
_LONGROPE = "its longrope turns a whole batch otherwise as soon as one prompt is longer"
_BROKEN = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer; ModelError if there is none."""
    try:
        return AutoTokenizer.from_pretrained(folder, **_LOCAL)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: its tokenizer cannot be loaded: {error}") from error


def context_tokens(folder: Path) -> int:
    """The longest prompt that the model in a folder reads."""
    return _context(_config(folder).get_text_config())


def context_reason(folder: Path) -> str:
    """Why the context is shorter than the model's name may promise, for a message; else empty."""
    text = _config(folder).get_text_config()
    return f" ({_LONGROPE})" if _context(text) < text.max_position_embeddings else ""


def load_model(
    folder: Path, *, dtype: str, device: str, quantize: Quantize = "none", gpus: int = 1
) -> LoadedModel:
    """The model in a folder; ModelError names what keeps it from being used.

    With `gpus` above one, its layers are dispatch over so many devices of this process.
    """
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder}: holds no .safetensors file; pickled weights are not read, convert them"
        )
    config = _config(folder)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            output_loading_info=True,
            **_LOCAL,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{folder}: cannot be loaded: {error}") from error
    network, found = loaded
    if missing := sorted(found["missing_keys"]):  # filled with random values, and only told
        raise ModelError(
            f"{folder}: cannot be loaded: its files lack {len(missing):,} of the model's tensors, "
            f"{missing[0]} first; copy the folder again, whole"
        )
    if gpus > 1:
        dispatch(network, [f"{device}:{i}" for i in range(gpus)])
        return prepare(network, dispatched=True)
    quantise(network, quantize, device)
    nn.Module.to(network, device)
    return prepare(network)


def _config(folder: Path) -> Any:
    """The folder's configuration; ModelError if it cannot be read, or is of no model for a tree."""
    try:
        config = AutoConfig.from_pretrained(folder, **_LOCAL)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ModelError(f"{folder}: cannot be loaded: {error}") from error
    refuse_unmodelled(config)
    text = config.get_text_config()
    refuse_unmodelled(text)
    _context(text)
    return config


def prepare(network: PreTrainedModel, *, dispatched: bool = False) -> LoadedModel:
    """The model with tree attention, once short forwards have shown that it answers as before.

    One that is dispatch over devices runs whole and call by call: a fused plan lies on one device,
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
        context_tokens=_context(config),
        stages=None,
        schedule="staged" if recurrent else "fused",
    )
    for model in [whole] if dispatched else _ways(whole):
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
    prefix, document, questions = ids[:5], ids[12:], (ids[5:8], ids[8:11], ids[11:12])
    states = read_prefix(model, prefix).ask(questions).states([document])[:, 0]
    with plain_attention(model.network, "eager"):
        alone = [_alone(model, [*prefix, *document, *question]) for question in questions]
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


def _context(config: Any) -> int:
    """The longest prompt, within which a token is turned by its own position and nothing else.

    Beyond the length that longrope was stretched from, transformers turns all tokens of a forward
    by other frequencies, so that a document's answer would hang on those beside it. `dynamic`
    frequencies change in the same way, but only beyond `max_position_embeddings` itself.
    """
    stated = getattr(config, "max_position_embeddings", None)
    if not isinstance(stated, int) or stated < 1:
        raise ModelError(
            f"{_family(config)} states no longest prompt (max_position_embeddings); {_USABLE}"
        )
    return min([stated, *_longrope_lengths(config)])


def _longrope_lengths(config: Any) -> list[int]:
    """The lengths from which longrope was stretched: of all layers, or of each of their types."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return [
        int(of_layers["original_max_position_embeddings"])
        for of_layers in (rope, *rope.values())
        if isinstance(of_layers, dict) and of_layers.get("rope_type") == "longrope"
    ]


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


def dispatch(network: PreTrainedModel, devices: Sequence[str]) -> None:
    """Moves the network, in place: as many of its layers to each device, give or take one."""
    try:
        dispatch_model(
            network, device_map(network, devices), main_device=devices[0], force_hooks=True
        )
    except (RuntimeError, ValueError, AttributeError) as error:
        raise ModelError(f"cannot be dispatch over {len(devices)} devices: {error}") from error


def device_map(network: PreTrainedModel, devices: Sequence[str]) -> dict[str, str]:
    """Where each part of the network goes, by its name in the network."""
    decoder: Any = network.base_model
    name, layers = network.base_model_prefix, len(decoder.layers)
    if layers < len(devices):
        raise ModelError(f"has {layers} layers; write gpus: {layers} or fewer")
    heads = [child for child, _ in network.named_children() if child != name]
    around = [f"{name}.{child}" for child, _ in decoder.named_children() if child != "layers"]
    return {
        **dict.fromkeys([*heads, *around], devices[0]),
        **{f"{name}.layers.{i}": devices[i * len(devices) // layers] for i in range(layers)},
    }


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
    prefix, below, document = ids[:3], tuple(ids[3:6]), ids[6:]
    found: dict[int, Tensor] = {}

    def take(depth: Depth, states: Sequence[Tensor]) -> None:
        found[depth.layer] = torch.stack([place[0].float() for place in states])

    depths = [Depth(layer, (below, None)) for layer in layers]
    read_prefix(model, prefix, layers=max(layers)).look(depths).descend([document], take)
    with plain_attention(model.network, "eager"):
        output = model.decoder(
            input_ids=torch.tensor([[*prefix, *document, *below]], device=model.device),
            use_cache=False,
            output_hidden_states=True,
        )
    own = slice(len(prefix), len(prefix) + len(document))
    errors = []
    for layer in layers:
        states = output.hidden_states[layer][0].float()
        alone = torch.stack([states[-1], states[own].mean(dim=0)])
        errors.append(relative(found[layer], alone))
    return max(errors)
