"""Keep a model's weights in 8 bits, with torchao, which is imported only if a spec asks for it.

Entry point: `quantise`. Only weights are rounded. Rounded weights are the same numbers for the tree
and for independent prompts, so the tree stays exact; `int8_products` rounds activations too.
Embeddings and the unembedding are not rounded: labels are read from rows of the unembedding, and
both are a small part of a large model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.errors import ModelError, Problem, SpecError
from pipeline.spec.model import Quantize


def quantise(network: PreTrainedModel, quantize: Quantize, device: str) -> None:
    """Move the model to the device, in place, and round its linear layers' weights to 8 bits.

    Layer by layer, so that the device never holds the whole unrounded model.
    """
    if quantize == "none":
        return
    refuse_experts(network)
    apply, config = _torchao(quantize)
    head = getattr(network, "lm_head", None)
    rounded = [m for m in network.modules() if isinstance(m, nn.Linear) and m is not head]
    chosen = {id(module) for module in rounded}
    try:
        apply(network, config, filter_fn=lambda module, _: id(module) in chosen, device=device)
        for module in rounded[:1]:
            module(torch.zeros(1, module.in_features, dtype=network.dtype, device=device))
    except (RuntimeError, AssertionError, AttributeError, TypeError, ValueError) as error:
        raise ModelError(
            f"quantize: {quantize} does not run on {device} with torch {torch.__version__}; "
            f"write another or none: {' '.join(str(error).split())}"
        ) from error


def require_torchao(quantize: Quantize) -> None:
    """SpecError if a spec asks for quantised weights and torchao is not installed."""
    if quantize in ("int8", "fp8"):
        _torchao(quantize)


def _torchao(quantize: Quantize) -> tuple[Callable[..., object], Any]:
    """torchao's function, and its configuration for these weights: one scale for each row."""
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        fix = f"needs torchao; pip install 'corpus-assay[quantize]', or write none: {error}"
        raise SpecError([Problem("model.quantize", fix, quantize)]) from error
    chosen = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}[quantize]
    # torchao would change the compiler's settings for the whole process; nothing is compiled here.
    return quantize_, chosen(set_inductor_config=False)


def refuse_experts(network: PreTrainedModel) -> None:
    """ModelError for a mixture of experts, most of whose weights are not in linear layers."""
    if expert_weights(network):
        raise ModelError(
            f"model family {network.config.get_text_config().model_type!r} keeps its experts' "
            "weights in one tensor, which is not quantised; write quantize: none"
        )


def expert_weights(module: nn.Module) -> list[Tensor]:
    """The weights of mixtures of experts, each `[experts, rows, columns]`.

    A convolution's weights, which also have three dimensions, are left out.
    """
    return [
        parameter
        for part in module.modules()
        if not isinstance(part, nn.Conv1d)
        for parameter in part.parameters(recurse=False)
        if parameter.ndim == 3
    ]
