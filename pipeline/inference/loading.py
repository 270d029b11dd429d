"""Load a causal language model from a local folder, ready for tree attention, or refuse it by name.

Entry points: `load_tokenizer`, `load_model`, and `prepare`, which proves on short prompts that the
model gives the same answers under the tree. Code that a model folder carries is never run.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import isnan
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import torch
from gguf import GGUFReader
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pipeline.errors import ModelError, one_line
from pipeline.inference.attention import hook
from pipeline.inference.attention.reference import attend_plainly
from pipeline.inference.attention.tiles import Kernel
from pipeline.inference.images import ImageReader
from pipeline.inference.model.linear import use_onednn
from pipeline.inference.model.llama import LlamaDecoder, has_llama_form
from pipeline.inference.model.loaded import LoadedModel, own_attention, set_attention
from pipeline.inference.model.operations import operations_for
from pipeline.inference.model.rounded_products import round_linear
from pipeline.inference.out_of_memory import is_out_of_memory, naming_lack_of_memory
from pipeline.inference.processor import native
from pipeline.inference.processor.native import attend_natively
from pipeline.inference.proof import tolerance, tree_error
from pipeline.spec.model import RoundedFormat

_STATELESS = {"full_attention", "sliding_attention", "mlp", "moe"}
_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_SUPPORTED = "use a decoder with full or sliding-window attention, or recurrent layers"
_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
_NO_IMAGES = (
    "`input.image` cannot use it; use a model of the LLaVA, Idefics3, SmolVLM or Qwen-VL kind"
)
_BIDIRECTIONAL_IMAGES = {"gemma3", "paligemma", "gemma4"}
# What a forward of an unsupported model raises, and a kernel that cannot be built.
_BROKEN = (AttributeError, LookupError, TypeError, ValueError, RuntimeError)
_UNBUILT = (OSError, SubprocessError)
# What transformers raises for files that it cannot make a model of.
UNREADABLE = (*_BROKEN, OSError, ImportError, ArithmeticError, AssertionError)
# Weights that models were saved with and do not use: buffers, the head of tied embeddings, the
# pooler of encoders, and the towers of images and sound.
_UNUSED = re.compile(
    r"(inv_freq|position_ids|attn\.(masked_)?bias|pooler\.\w+\.(weight|bias))$"
    r"|^lm_head\.weight$|(^|\.)(vision|visual|audio|image|mm|multi_modal|mtp)"
)

logger = logging.getLogger(__name__)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The folder's tokenizer; ModelError if there is none."""
    if (folder / "config.json").is_file():
        read_config(folder)  # — which transformers reads, too: its mistakes are not the tokenizer's
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **_LOCAL)
        of_processor = folder / "chat_template.json"  # where older models with images have it
        if not tokenizer.chat_template and of_processor.is_file():
            tokenizer.chat_template = json.loads(of_processor.read_text())["chat_template"]
        return tokenizer
    except Exception as error:  # — the tokenizers library raises `Exception` itself
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ModelError(f"{folder}: its tokenizer cannot be loaded: {reason}") from error


def context_tokens(folder: Path) -> int:
    """The longest prompt that the model in a folder reads."""
    return _longest_prompt(_config(folder).get_text_config())


def context_reason(folder: Path) -> str:
    """Why the context is shorter than the configuration states, for a message; else empty."""
    text = _config(folder).get_text_config()
    if _longest_prompt(text) == text.max_position_embeddings:
        return ""
    return " (one longer prompt would change the longrope frequencies of its whole batch)"


def read_config(folder: Path) -> Any:
    """The folder's configuration; ModelError if it is unreadable."""
    try:
        return AutoConfig.from_pretrained(folder, **_LOCAL)
    except (*UNREADABLE, StrictDataclassError) as error:
        raise ModelError(f"{folder}: cannot be loaded: {one_line(error)}") from error


def _config(folder: Path) -> Any:
    """The folder's configuration; ModelError if it is unreadable or of an unsupported family."""
    config = read_config(folder)
    text = config.get_text_config()
    refuse_unsupported(config)
    refuse_unsupported(text)
    _longest_prompt(text)
    return config


def _seeing_config(folder: Path) -> Any:
    """As `_config`; ModelError if it has no vision tower, or its images are not supported."""
    config = _config(folder)
    if getattr(config, "vision_config", None) is None:
        raise ModelError(f"{folder}: {_family(config)} has no vision tower, and {_NO_IMAGES}")
    if config.model_type in _BIDIRECTIONAL_IMAGES:
        raise ModelError(
            f"{_family(config)}: the tokens of an image attend to later ones, which assay does "
            f"not support, so {_NO_IMAGES}"
        )
    return config


def _family(config: Any) -> str:
    return f"model family {config.model_type!r}"


def refuse_unsupported(config: Any) -> None:
    """ModelError for a family whose attention has something that assay does not support."""
    unknown = sorted(_layer_types(config) - _STATELESS - _RECURRENT)
    stated: Any = partial(getattr, config)
    heads, kv_heads = stated("num_attention_heads", 0), stated("num_key_value_heads", 0)
    counted = isinstance(heads, int) and isinstance(kv_heads, int)
    features = {
        f"{heads} heads for {kv_heads} heads of keys": counted and heads % (kv_heads or 1) > 0,
        f"layers of type {unknown}": bool(unknown),
        "bidirectional attention": bool(getattr(config, "use_bidirectional_attention", False)),
        "ALiBi positions": bool(getattr(config, "alibi", False)),
        "an encoder": bool(getattr(config, "is_encoder_decoder", False)),
    }
    if present := [feature for feature, is_present in features.items() if is_present]:
        raise ModelError(
            f"{_family(config)} has {', '.join(present)}, which assay does not support; "
            f"{_SUPPORTED}"
        )


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ())


def _longest_prompt(config: Any) -> int:
    """The most tokens whose rotary embedding depends on their own position only.

    LongRoPE (Ding et al., 2024) switches to other frequencies for all tokens of a forward once one
    of them is beyond the original length: a document's answer would depend on its batch. `dynamic`
    NTK scaling does the same, but only beyond `max_position_embeddings`; YaRN never does.
    """
    stated = getattr(config, "max_position_embeddings", None)
    if not isinstance(stated, int) or stated < 1:
        raise ModelError(
            f"{_family(config)} does not state its longest prompt (max_position_embeddings); "
            f"{_SUPPORTED}"
        )
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}  # or by layer type
    original = [
        int(parameters["original_max_position_embeddings"])
        for parameters in (rope, *rope.values())
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope"
    ]
    return min([stated, *original])


def load_model(
    folder: Path,
    *,
    dtype: str,
    device: str,
    rounded_to: RoundedFormat | None = None,
    sees_images: bool = False,
) -> LoadedModel:
    """The model in a folder; ModelError names what makes it unusable.

    With `rounded_to`, the linear layers of the decoder multiply 8-bit numbers. With `sees_images`,
    its vision tower and image processor are loaded, too.
    """
    kind: Any = AutoModelForImageTextToText if sees_images else AutoModelForCausalLM
    config_of = _seeing_config if sees_images else _config
    fix = "copy the whole folder again"
    with naming_lack_of_memory(str(folder), "load it"):
        network = read_network(folder, kind, config_of, dtype=dtype, fix=fix)
        nn.Module.to(network, device)
        # — proved before it is rounded: rounding turns differences of the last bit into whole steps
        model = prepare(network, images=ImageReader.of(folder) if sees_images else None)
        if rounded_to is not None:
            model = rounded(model, rounded_to)
            torch.cuda.empty_cache()  # — the weights before they were rounded
        return replace(model, products=use_onednn(network))


def rounded(model: LoadedModel, rounded_to: RoundedFormat) -> LoadedModel:
    """The model with products of 8-bit numbers; its network is changed in place.

    Attention is in bfloat16, which rounds less, where the processor has its products.
    """
    round_linear(model.network, rounded_to)
    if model.llama is not None:
        model = replace(model, llama=LlamaDecoder(model.decoder, model.llama.operations))
    if model.kernel is attend_natively and native.computes(torch.bfloat16):
        kernel = partial(attend_natively, computed=torch.bfloat16)
        model = replace(model, kernel=kernel, kernel_name=f"{native.build()} bfloat16")
    return model


def read_network(
    folder: Path, kind: Any, config_of: Callable[[Path], Any], *, dtype: str, fix: str
) -> PreTrainedModel:
    """The network in a folder, on the CPU; ModelError names what makes it unusable.

    `kind` is the class of transformers that reads it. `config_of` reads its configuration, and
    refuses what cannot be used. `fix` is what to do about tensors that the files lack.
    """
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder}: holds no .safetensors file; pickled weights are not read, convert them"
        )
    config = config_of(folder)
    logging.getLogger("transformers.modeling_utils").addFilter(_is_no_table)
    try:
        loaded: Any = kind.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # — its own error names no tensor
            **_LOCAL,
        )
    except (*UNREADABLE, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{folder}: cannot be loaded: {one_line(error)}") from error
    network: PreTrainedModel
    network, report = loaded
    if wrong := next(_wrong_tensors(report), None):
        raise ModelError(f"{folder}: cannot be loaded: {wrong}; {fix}")
    return network


def _wrong_tensors(report: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the tensors of a folder; transformers fills missing ones at random."""
    for name, stored, own in sorted(report["mismatched_keys"]):
        shapes = f"{list(stored)} in its files, and {list(own)} by its config.json"
        yield f"{name} has the shape {shapes}"
    if missing := sorted(report["missing_keys"]):
        yield f"its files lack {len(missing):,} of the model's tensors, {missing[0]} first"
    if unused := sorted(name for name in report["unexpected_keys"] if not _UNUSED.search(name)):
        places = f"no place in the model of its config.json, {unused[0]} first"
        yield f"{len(unused):,} tensors of its files have {places}"


def converted_bytes(gguf: Path) -> int:
    """The bytes of a GGUF file's weights in float32; ModelError if it is not whole."""
    try:
        return 4 * sum(int(tensor.n_elements) for tensor in GGUFReader(gguf).tensors)
    except (*UNREADABLE, EOFError) as error:
        raise ModelError(f"{gguf}: cannot be read as a GGUF model: {one_line(error)}") from error


def _is_no_table(record: logging.LogRecord) -> bool:
    """False for the table of missing and unused tensors, which `_wrong_tensors` reports."""
    return "LOAD REPORT" not in record.getMessage()


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's weights, dequantised to float32 (exact), and tokenizer to a folder.

    Done once for each file, because transformers takes half a minute to read GGUF.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        network = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    except UNREADABLE as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{gguf}: cannot be read as a GGUF model: {one_line(error)}") from error
    # The weights are dequantised, but transformers refuses to save a model marked as quantised.
    vars(network).pop("hf_quantizer", None)
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare(network: PreTrainedModel, *, images: ImageReader | None = None) -> LoadedModel:
    """The model with tree attention, after short forwards have proved its answers."""
    config = network.config.get_text_config()
    refuse_unsupported(config)
    hook.register()
    # Reported to give wrong answers with a cached prefix.
    torch.backends.cuda.enable_cudnn_sdp(False)
    nn.Module.eval(network).requires_grad_(False)
    # Layers that carry a state from token to token need the staged schedule.
    staged = not _RECURRENT.isdisjoint(_layer_types(config))
    set_attention(network, own_attention(network) if staged else hook.IMPLEMENTATION)
    # Some families keep the window on the attention module, others only in the configuration.
    windows = {getattr(module, "sliding_window", None) for module in network.modules()}
    whole = LoadedModel(
        network=network,
        windows=frozenset({*windows, getattr(config, "sliding_window", None), None}),
        context_tokens=_longest_prompt(config),
        schedule="staged" if staged else "fused",
        images=images,
    )
    if images is not None and staged:
        raise ModelError(f"{_family(network.config)} has recurrent layers, and {_NO_IMAGES}")
    if staged and network.device.type == "cuda":
        logger.warning(
            "of a model with recurrent layers, a GPU reads together only documents of one length; "
            "`engine: vllm` in the spec's model reads those of all lengths together"
        )
    reason: ModelError | None = None
    for model in _variants(whole):
        try:
            prove_tree(model)
        except ModelError as error:
            reason = error
            continue
        if reason is not None:
            logger.warning("a slower way to run the model is used: %s", one_line(reason))
        return model
    assert reason is not None, "a model without variants"
    raise reason


def prove_tree(model: LoadedModel) -> None:
    """ModelError unless the model gives the same answers under the tree as alone."""
    config = model.network.config.get_text_config()
    # — Triton is imported only where its kernel is tried
    of_triton = getattr(sys.modules.get("triton.errors"), "TritonError", RuntimeError)
    try:
        error = tree_error(model)
    except (*_BROKEN, *_UNBUILT, of_triton) as reason:
        if is_out_of_memory(reason):
            raise
        refusal = f"{_family(config)} does not run under the tree: {reason!r}"
        raise ModelError(refusal) from reason
    if isnan(error):
        weights = model.network.named_parameters()
        wrong = next((name for name, w in weights if not w.isfinite().all()), "a state")
        fix = "write dtype: float32, or copy the whole folder again"
        raise ModelError(f"{_family(config)} computes NaN: {wrong} has NaN or infinity; {fix}")
    if not error <= tolerance(model):
        raise ModelError(
            f"{_family(config)} gives other answers under the tree: its states or logits "
            f"differ by {error:.1g} of their norm; {_SUPPORTED}"
        )


def _variants(whole: LoadedModel) -> list[LoadedModel]:
    """The ways to run the model, the fastest first."""
    if whole.schedule == "staged":
        return [replace(whole, kernel_name=own_attention(whole.network))]
    network, decoders = whole.network, list[LlamaDecoder | None]()
    if has_llama_form(network):
        ways = operations_for(network.device, network.dtype)
        decoders += [LlamaDecoder(whole.decoder, way) for way in ways]
    return [
        replace(whole, llama=llama, kernel=kernel, kernel_name=name)
        for llama in [*decoders, None]
        for name, kernel in kernels_for(network).items()
    ]


def kernels_for(network: PreTrainedModel) -> dict[str, Kernel]:
    """The kernels of attention for the network's device and number format, the fastest first."""
    kernels: dict[str, Kernel] = {}
    narrow = str(network.dtype).removeprefix("torch.")
    if network.device.type == "cuda":
        try:
            from pipeline.inference.attention.triton_tiles import attend_tiles
        except ImportError:  # — torch for Windows comes without Triton
            pass
        else:
            kernels[f"triton {narrow}"] = attend_tiles
    elif network.device.type == "cpu" and native.takes(network.dtype):
        products = narrow if native.computes(network.dtype) else "float32"
        kernels[f"{native.build()} {products}"] = attend_natively
    return {**kernels, f"torch {narrow}": attend_plainly}
