"""The products of linear layers, on a processor by the library that is fast there.

Entry points: `use_onednn`, once a network, and `Products`, for layers that read the same rows.

torch takes MKL for float32 products, which takes AVX2 instructions on processors of AMD: with
AVX-512 oneDNN is twice as fast there (118 against 265 GFLOP/s a thread of an EPYC of family 26). On
Intel's they differ by some percent, and on an EPYC without AVX-512 MKL is ahead by 5 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

_pointwise: Any = torch.ops.mkldnn._linear_pointwise


@cache
def is_onednn_faster(device: str, dtype: torch.dtype) -> bool:
    """Whether products on a kind of device, as torch names it, are those of oneDNN."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and bool(torch.cpu.get_capabilities().get("avx512_f"))


def use_onednn(network: nn.Module) -> str:
    """Gives the linear layers of a network oneDNN's product where it is faster; who computes it.

    For half precision torch calls oneDNN itself.
    """
    layers = [module for module in network.modules() if type(module) is nn.Linear]
    if not layers or not is_onednn_faster(layers[0].weight.device.type, layers[0].weight.dtype):
        return "torch"
    for layer in layers if layers[0].weight.dtype == torch.float32 else ():
        layer.forward = partial(_product, layer)  # type: ignore[method-assign]
    return "oneDNN"


def _product(layer: nn.Linear, x: Tensor) -> Tensor:
    product: Tensor = _pointwise(x, layer.weight, layer.bias, "none", [], "")
    return product


class Products:
    """Linear layers that read the same rows. Entry point: `of`."""

    def __init__(self, *layers: Any) -> None:
        self.layers = layers

    @staticmethod
    def of(*layers: nn.Linear) -> Products:
        """The products of these layers by the library that is fast for them."""
        weight = layers[0].weight
        fused = is_onednn_faster(weight.device.type, weight.dtype)
        return (FusedProducts if fused else Products)(*layers)

    def __call__(
        self,
        x: Tensor,  # [rows, inputs]
    ) -> Sequence[Tensor]:  # of each layer: [rows, outputs]
        return [layer(x) for layer in self.layers]

    def added_to(
        self,
        states: Tensor,  # [rows, outputs]
        x: Tensor,  # [rows, inputs]
    ) -> Tensor:  # [rows, outputs]
        """The states plus the product of the only layer."""
        [product] = self(x)
        return product.add_(states)


class FusedProducts(Products):
    """Products of oneDNN, which computes what follows them before they leave the cache."""

    def added_to(self, states: Tensor, x: Tensor) -> Tensor:
        [layer] = self.layers
        added: Tensor = _pointwise.binary(x, states, layer.weight, layer.bias, "add")
        return added

    def gated(
        self,
        x: Tensor,  # [rows, inputs]
    ) -> Tensor:  # [rows, outputs]
        """silu of the first layer's product, times the second's."""
        gate, up = self.layers
        gates = _pointwise(x, gate.weight, gate.bias, "swish", [], "")
        gated: Tensor = _pointwise.binary(x, gates, up.weight, up.bias, "mul")
        return gated
