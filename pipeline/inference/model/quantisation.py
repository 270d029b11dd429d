"""Keep a model's weights in 8 bits, through torchao, which is imported where that is asked for.

Only weights: an activation rounded to 8 bits takes a whole step where float32 sums in another order
differ in their last bits, so a tree and independent prompts would part by such steps. Rounded
weights are the same numbers for both, and the tree stays exact. Embeddings and the unembedding keep
theirs: labels are read off the latter's rows, and of a large model they are a small part.

Knows which weights those are. Knows nothing of files, prompts or documents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.errors import ModelError, Problem, SpecError
from pipeline.spec.schema import Quantize

_REFUSED = (RuntimeError, AssertionError, AttributeError, TypeError, ValueError)


def quantise(network: PreTrainedModel, quantize: Quantize, device: str) -> None:
    """Move the model to the device, its linear layers' weights rounded to 8 bits on the way.

    In place, and layer by layer, so that the device never holds the whole model unrounded.
    """
    if quantize == "none":
        return
    _refuse_experts(network)
    apply, config = _torchao(quantize)
    head = getattr(network, "lm_head", None)
    rounded = [m for m in network.modules() if isinstance(m, nn.Linear) and m is not head]
    chosen = {id(module) for module in rounded}
    try:
        apply(network, config, filter_fn=lambda module, _: id(module) in chosen, device=device)
        for module in rounded[:1]:
            module(torch.zeros(1, module.in_features, dtype=network.dtype, device=device))
    except _REFUSED as error:
        raise ModelError(
            f"quantize: {quantize} does not run on {device} with torch {torch.__version__}; "
            f"write another or none: {' '.join(str(error).split())}"
        ) from error


def require_torchao(quantize: Quantize) -> None:
    """SpecError where a spec asks for quantised weights and torchao is not installed."""
    if quantize != "none":
        _torchao(quantize)


def _torchao(quantize: Quantize) -> tuple[Callable[..., object], Any]:
    """torchao's function, and its configuration for these weights: one scale a row."""
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        fix = f"needs torchao; pip install 'assay[quantize]', or write none: {error}"
        raise SpecError([Problem("model.quantize", fix, quantize)]) from error
    chosen = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}[quantize]
    # Its settings for the compiler would be the whole process's, and nothing is compiled here.
    return quantize_, chosen(set_inductor_config=False)


def _refuse_experts(network: PreTrainedModel) -> None:
    """ModelError for a mixture whose experts, most of its weights, would be left as they are."""
    if expert_weights(network):
        raise ModelError(
            f"model family {network.config.get_text_config().model_type!r} keeps its experts' "
            "weights in one tensor, which is not quantised; write quantize: none"
        )


def expert_weights(module: nn.Module) -> list[Tensor]:
    """Each such tensor, `[experts, rows, columns]`; convolutions too have weights of three dims."""
    return [
        parameter
        for part in module.modules()
        if not isinstance(part, nn.Conv1d)
        for parameter in part.parameters(recurse=False)
        if parameter.ndim == 3
    ]
