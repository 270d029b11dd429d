"""How a processor computes a model fastest: the library of its products, the format of attention.

Entry points: `use_fastest_library` and `fastest_attention`, once a network, and `LIBRARIES`. For
float32, torch's choice is MKL, which takes AVX2 instructions on processors of AMD: there oneDNN is
twice as fast (118 against 265 GFLOP/s a thread of an EPYC of family 26). On Intel's they differ by
some percent. Sums are added in another order, so answers differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.inference.attention.kernels import attend
from pipeline.inference.processor.native import least_seconds

# Inputs [..., inputs], weight [outputs, inputs] and bias [outputs] -> [..., outputs].
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_ROWS = 512
# A way is taken if it needs less than this share of the other's seconds. Libraries differ by two
# times (AMD) or by some percent (Intel), and a probe on a busy machine errs by some percent, too.
_CLEARLY_LESS = 0.8


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


LIBRARIES: dict[str, Product] = {"torch": nn.functional.linear}
if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    LIBRARIES["oneDNN"] = _onednn


def use_fastest_library(network: nn.Module) -> str:
    """Gives the linear layers of a network the product that is fastest here; returns its name.

    torch's own stays on GPUs and for half precision, for which torch calls oneDNN itself.
    """
    layers = [module for module in network.modules() if type(module) is nn.Linear]
    weights = [layer.weight for layer in layers]
    if not weights or weights[0].device.type != "cpu" or weights[0].dtype != torch.float32:
        return "torch"
    # — the median: the unembedding is wider than all others and takes little of the time
    weight = sorted(weights, key=Tensor.numel)[len(weights) // 2]
    name = _fastest_library(*weight.shape)
    if name != "torch":
        for layer in layers:
            layer.forward = partial(_forward, layer, LIBRARIES[name])  # type: ignore[method-assign]
    return name


@cache
@torch.inference_mode()
def _fastest_library(outputs: int, inputs: int) -> str:
    """The library for weights [outputs, inputs]: some milliseconds decide, once a process.

    So a model that is loaded twice in a process rounds alike.
    """
    x, weight = torch.ones(_ROWS, inputs), torch.ones(outputs, inputs)
    ways = {name: partial(product, x, weight, None) for name, product in LIBRARIES.items()}
    seconds = least_seconds(ways)
    name = min(seconds, key=lambda name: seconds[name])
    return name if seconds[name] < _CLEARLY_LESS * seconds["torch"] else "torch"


def _forward(layer: nn.Linear, product: Product, x: Tensor) -> Tensor:
    return product(x, layer.weight, layer.bias)


def fastest_attention(network: PreTrainedModel) -> torch.dtype | None:
    """The number format of the attention of a model with 8-bit products; None: that of its states.

    bfloat16, which rounds less than 8 bits do, where the processor computes it faster than float32.
    """
    is_decided = network.device.type == "cpu" and network.dtype == torch.float32
    return _fastest_attention() if is_decided else None


@cache
@torch.inference_mode()
def _fastest_attention() -> torch.dtype | None:
    """The same of any such model: some milliseconds decide, once a process."""
    q = torch.ones(1, _ROWS, 8, 64)
    seconds = least_seconds(
        {
            dtype: partial(attend, q, q, q, scale=0.125, causal=True, computed=dtype)
            for dtype in (torch.float32, torch.bfloat16)
        }
    )
    is_faster = seconds[torch.bfloat16] < _CLEARLY_LESS * seconds[torch.float32]
    return torch.bfloat16 if is_faster else None
