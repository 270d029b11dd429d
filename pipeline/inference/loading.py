"""Load a causal language model from a local folder, ready for tree attention, or refuse it by name.

Entry points: `load_tokenizer`, `load_model`, and `prepare`, which proves on short prompts that the
model gives the same answers under the tree. Code that a model folder carries is never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
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
from pipeline.inference.attention import hook
from pipeline.inference.attention.varlen import Kernel, flash_kernel
from pipeline.inference.model.families import (
    SUPPORTED,
    family_name,
    is_recurrent,
    longest_prompt,
    refuse_unsupported,
)
from pipeline.inference.model.loaded import LoadedModel, cut_last_layer, plain_attention
from pipeline.inference.model.quantisation import quantise
from pipeline.inference.schedules import read_prefix
from pipeline.inference.schedules.interface import LayerStates, ReadPoint
from pipeline.spec.schema import Quantize

_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
# Relative errors of rounding; a wrong mask makes an error near 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
_LONGEST_PROVED_WINDOW = 1_024
_BROKEN = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer; ModelError if there is none."""
    try:
        return AutoTokenizer.from_pretrained(folder, **_LOCAL)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: its tokenizer cannot be loaded: {error}") from error


def context_tokens(folder: Path) -> int:
    """The longest prompt that the model in a folder reads."""
    return longest_prompt(_config(folder).get_text_config())


def context_reason(folder: Path) -> str:
    """Why the context is shorter than the configuration states, for a message; else empty."""
    text = _config(folder).get_text_config()
    if longest_prompt(text) == text.max_position_embeddings:
        return ""
    return " (one longer prompt would change the longrope frequencies of its whole batch)"


def _config(folder: Path) -> Any:
    """The folder's configuration; ModelError if it is unreadable or of an unsupported family."""
    try:
        config = AutoConfig.from_pretrained(folder, **_LOCAL)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ModelError(f"{folder}: cannot be loaded: {error}") from error
    text = config.get_text_config()
    refuse_unsupported(config)
    refuse_unsupported(text)
    longest_prompt(text)
    return config


def load_model(
    folder: Path, *, dtype: str, device: str, quantize: Quantize = "none", gpus: int = 1
) -> LoadedModel:
    """The model in a folder; ModelError names what makes it unusable.

    With `gpus` above one, its layers are dispatched over this many devices of the process.
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
    network, report = loaded
    # transformers only reports missing tensors, and fills them with random values.
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{folder}: cannot be loaded: its files lack {len(missing):,} of the model's tensors, "
            f"{missing[0]} first; copy the whole folder again"
        )
    if gpus > 1:
        dispatch(network, [f"{device}:{i}" for i in range(gpus)])
        return prepare(network, dispatched=True)
    quantise(network, quantize, device)
    nn.Module.to(network, device)
    return prepare(network)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's weights, dequantised to float32 (exact), and tokenizer to a folder.

    Done once for each file, because transformers takes half a minute to read GGUF.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        network = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{gguf}: cannot be read as a GGUF model: {error}") from error
    # The weights are dequantised, but transformers refuses to save a model marked as quantised.
    vars(network).pop("hf_quantizer", None)
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def dispatch(network: PreTrainedModel, devices: Sequence[str]) -> None:
    """Move the network's layers, in place, evenly over the devices."""
    try:
        dispatch_model(
            network, device_map(network, devices), main_device=devices[0], force_hooks=True
        )
    except (RuntimeError, ValueError, AttributeError) as error:
        raise ModelError(f"cannot be dispatched over {len(devices)} devices: {error}") from error


def device_map(network: PreTrainedModel, devices: Sequence[str]) -> dict[str, str]:
    """The device of each part of the network, by the part's name."""
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


def prepare(network: PreTrainedModel, *, dispatched: bool = False) -> LoadedModel:
    """The model with tree attention, after short forwards have proved its answers.

    A dispatched model runs whole and without a fused kernel: a compiled plan is on one device, and
    accelerate's hooks, which move states between devices, belong to the whole decoder.
    """
    config = network.config.get_text_config()
    refuse_unsupported(config)
    hook.register()
    # Reported to give wrong answers with a cached prefix.
    torch.backends.cuda.enable_cudnn_sdp(False)
    nn.Module.eval(network).requires_grad_(False)
    network.set_attn_implementation(hook.IMPLEMENTATION)
    # Some families keep the window on the attention module, others only in the configuration.
    windows = {getattr(module, "sliding_window", None) for module in network.modules()}
    whole = LoadedModel(
        network=network,
        windows=frozenset({*windows, getattr(config, "sliding_window", None), None}),
        context_tokens=longest_prompt(config),
        stages=None,
        schedule="staged" if is_recurrent(config) else "fused",
    )
    for model in [whole] if dispatched else _variants(whole):
        try:
            error = tree_error(model)
        except _BROKEN as reason:
            refusal = ModelError(f"{family_name(config)} does not run under the tree: {reason!r}")
            refusal.__cause__ = reason
            continue
        if error <= TOLERANCE[network.dtype]:
            return model
        refusal = ModelError(
            f"{family_name(config)} gives other answers under the tree: its states or logits "
            f"differ by {error:.1g} of their norm; {SUPPORTED}"
        )
    raise refusal


def _variants(whole: LoadedModel) -> list[LoadedModel]:
    """The ways to run the model, the fastest first."""
    if whole.schedule == "staged":
        return [whole]
    plain = [whole]
    with suppress(AttributeError):  # some decoders are not built of `layers` and a `norm`
        plain.insert(0, replace(whole, stages=cut_last_layer(whole.decoder)))
    kernel = fused_kernel(whole.network)
    return [*(replace(model, kernel=kernel) for model in plain if kernel), *plain]


def fused_kernel(network: PreTrainedModel) -> Kernel | None:
    """The kernel for the network's device and dtype; None where no faster one exists."""
    half = network.dtype in (torch.bfloat16, torch.float16)
    return flash_kernel() if network.device.type == "cuda" and half else None


@torch.inference_mode()
def tree_error(model: LoadedModel) -> float:
    """The relative error of questions' states and logits against independent prompts.

    The document is longer than the model's short windows. One question has one token, where a
    recurrent state that was lost shows most. Relative: the norm of the difference over the norm of
    the states, or of the logits, whichever is larger.
    """
    short = [window for window in model.windows if window and window <= _LONGEST_PROVED_WINDOW]
    ids = _proof_ids(model, 36 + max(short, default=0))
    prefix, document, questions = ids[:5], ids[12:], (ids[5:8], ids[8:11], ids[11:12])
    point = ReadPoint(model.layers, tuple(tuple(question) for question in questions))
    by_layer: list[LayerStates] = []
    read_prefix(model, prefix).reader([point]).read_layers([document], by_layer.append)
    states = by_layer[0].at_suffixes[:, 0]
    with plain_attention(model.network, "eager"):
        alone = [_alone(model, [*prefix, *document, *question]) for question in questions]
    expected, logits = (torch.stack(tensors) for tensors in zip(*alone, strict=True))
    return max(_relative_error(states, expected), _relative_error(model.unembed(states), logits))


def _alone(
    model: LoadedModel, token_ids: list[int]
) -> tuple[Tensor, Tensor]:  # [hidden] and [vocab]
    """The last state and its logits as transformers computes them."""
    input_ids = torch.tensor([token_ids], device=model.device)
    state: Tensor = model.decoder(input_ids=input_ids, use_cache=False).last_hidden_state[0, -1]
    output = model.network(input_ids=input_ids, use_cache=False, logits_to_keep=1)
    return state, output.logits[0, -1]


def _proof_ids(model: LoadedModel, tokens: int) -> list[int]:
    """Token ids spread over the vocabulary."""
    vocabulary = model.network.config.get_text_config().vocab_size
    return [(7_919 * i + 13) % vocabulary for i in range(tokens)]


def _relative_error(
    actual: Tensor,  # [rows, dim]
    expected: Tensor,  # [rows, dim]
) -> float:
    """Over all rows together: half precision sends a token to another expert now and then."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def proved_at(model: LoadedModel, layers: Sequence[int]) -> LoadedModel:
    """The model, in stages or whole, after a short forward has proved its states at the layers.

    ModelError where neither gives them: layers of some families read more than the layer before.
    """
    depths = sorted(set(layers))
    variants = [model] if model.stages is None else [model, replace(model, stages=None)]
    errors = []
    for variant in variants:
        errors.append(_depth_error(variant, depths))
        if errors[-1] <= TOLERANCE[model.network.dtype]:
            return variant
    raise ModelError(
        f"{family_name(model.network.config)} has other states between its layers than "
        f"transformers computes: they differ by {min(errors):.1g} of their norm after the layers "
        f"{depths}; use readouts of its last layer"
    )


@torch.inference_mode()
def _depth_error(model: LoadedModel, layers: Sequence[int]) -> float:
    """The relative error of the states at the layer where it is largest."""
    ids = _proof_ids(model, 24)
    prefix, below, document = ids[:3], tuple(ids[3:6]), ids[6:]
    points = [ReadPoint(layer, (below,), mean=True) for layer in layers]
    schedule = read_prefix(model, prefix, layers=max(layers))
    by_layer: list[LayerStates] = []
    schedule.reader(points).read_layers([document], by_layer.append)
    with plain_attention(model.network, "eager"):
        output = model.decoder(
            input_ids=torch.tensor([[*prefix, *document, *below]], device=model.device),
            use_cache=False,
            output_hidden_states=True,
        )
    own = slice(len(prefix), len(prefix) + len(document))
    errors = []
    for read in by_layer:
        states = output.hidden_states[read.layer][0].float()
        alone = torch.stack([states[-1], states[own].mean(dim=0)])
        assert read.mean is not None, read.layer
        together = torch.stack([read.at_suffixes[0, 0].float(), read.mean[0]])
        errors.append(_relative_error(together, alone))
    return max(errors)
