"""The library that a processor multiplies matrices with: torch's own choice, or oneDNN.

Entry points: `use_fastest_library`, once a loaded network, and `LIBRARIES`. For float32, torch's
choice is MKL, which takes AVX2 instructions on processors of AMD: there oneDNN is twice as fast
(118 against 265 GFLOP/s a thread of an EPYC of family 26). On Intel's they differ by some percent.
Sums are added in another order, so answers differ by rounding alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

# Inputs [..., inputs], weight [outputs, inputs] and bias [outputs] -> [..., outputs].
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_ROWS, _ROUNDS = 512, 5
_CLEARLY_LESS = 0.95  # of the seconds: less is noise


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


LIBRARIES: dict[str, Product] = {"torch": nn.functional.linear}
if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    LIBRARIES["oneDNN"] = _onednn


@torch.inference_mode()
def use_fastest_library(network: nn.Module) -> str:
    """Gives the linear layers of a network the product that is fastest here; returns its name.

    Some milliseconds on weights of the network decide. torch's own stays on GPUs and for
    half precision, for which torch calls oneDNN itself.
    """
    layers = [module for module in network.modules() if type(module) is nn.Linear]
    weights = [layer.weight for layer in layers]
    if not weights or weights[0].device.type != "cpu" or weights[0].dtype != torch.float32:
        return "torch"
    # — the median: the unembedding is wider than all others and takes little of the time
    seconds = _seconds(sorted(weights, key=Tensor.numel)[len(weights) // 2])
    name = min(seconds, key=lambda name: seconds[name])
    if seconds[name] > _CLEARLY_LESS * seconds["torch"]:
        return "torch"
    for layer in layers:
        layer.forward = partial(_forward, layer, LIBRARIES[name])  # type: ignore[method-assign]
    return name


def _forward(layer: nn.Linear, product: Product, x: Tensor) -> Tensor:
    return product(x, layer.weight, layer.bias)


def _seconds(weight: Tensor) -> dict[str, float]:  # weight [outputs, inputs]
    """The least time of a product with each library, which take turns."""
    _outputs, inputs = weight.shape
    x = torch.randn(_ROWS, inputs, dtype=weight.dtype)
    least = dict.fromkeys(LIBRARIES, float("inf"))
    for _ in range(_ROUNDS):
        for name, product in LIBRARIES.items():
            started = time.perf_counter()
            product(x, weight, None)
            least[name] = min(least[name], time.perf_counter() - started)
    return least
