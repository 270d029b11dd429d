"""Linear layers that multiply 8-bit numbers: `dtype: int8` on CPUs, and `dtype: fp8` on GPUs.

Entry point: `round_linear`. The embedding and the unembedding keep their format.

A weight has one scale for each output channel and is rounded once. An activation has one scale for
each token, computed in every forward, so a row of a product does not depend on the other rows of
its batch. This is the vector-wise quantisation of LLM.int8() (Dettmers et al., 2022).

Sums of integers are exact. A few columns of the activations are much larger than the others, and
would take most of the 127 steps: so both sides are first multiplied by Hadamard matrices of blocks
of columns, which leaves the product as it is and evens out its columns (QuaRot: Ashkboos et al.,
2024). The steps of fp8 (e4m3, up to 448: Micikevicius et al., 2022) are relative to each number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from pipeline.errors import ModelError, one_line
from pipeline.inference.model.linear import Products
from pipeline.inference.processor import native
from pipeline.spec.model import RoundedFormat

_pointwise: Any = torch.ops.onednn.qlinear_pointwise
# Instructions that multiply unsigned by signed bytes and add in 32 bits. Without them oneDNN adds
# pairs of products in 16 bits, which overflow.
_CPU_FEATURES = ("avx512_vnni", "avx_vnni", "amx_int8", "i8mm")
_ZERO_POINT = 128  # activations of -127 to 127 steps are the bytes 1 to 255
# cuBLAS was reported to have no row-wise product of up to 256 rows and many columns on an H100:
# https://github.com/pytorch/ao/issues/4582
_FP8_ROWS = 257
# Columns of a block. SmolLM2's states after layers 8, 16 and 30 are off by .095, .115 and .137 of
# their norm without blocks, by .038, .050 and .054 with 16, by .033, .043 and .053 with 32, and by
# .032, .040 and .055 with 64 columns, which take twice as long as 32.
_BLOCK = native.ROUNDED_TOGETHER


class RoundedRows(NamedTuple):
    """Rows in 8 bits, in units of their own."""

    quantized: Tensor  # [rows, inputs]: uint8, shifted by _ZERO_POINT, or fp8
    scale: Tensor  # [rows, 1] fp32: the size of a unit


@cache
def _hadamard(columns: int) -> Tensor:  # [columns, columns]
    """The orthonormal Hadamard matrix of a power of two (Sylvester's construction)."""
    of_two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    signs: Tensor = reduce(torch.kron, [of_two] * (columns.bit_length() - 1), torch.ones(1, 1))
    return signs.mul_(columns**-0.5)


def even_out(
    x: Tensor,  # [rows, inputs]
) -> Tensor:  # [rows, inputs]
    """The rows in a basis in which no column is much larger than those beside it.

    The same basis for all tensors of as many inputs.
    """
    _rows, inputs = x.shape
    block = min(_BLOCK, inputs & -inputs)  # — the largest power of two that divides it
    return (x.reshape(-1, block) @ _hadamard(block).to(x.dtype)).view(x.shape)


def _scales(
    x: Tensor,  # [rows, inputs]
    largest: float,
) -> Tensor:  # [rows, 1] fp32
    """The unit in which the largest magnitude of each row is this number."""
    # — amax and amin are vectorised; aminmax takes seven times as long
    magnitudes = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
    return (magnitudes.float() / largest).clamp_(min=torch.finfo(torch.float32).tiny)


class RoundedLinear(nn.Module):
    """A linear layer whose weights and activations are multiplied as 8-bit numbers."""

    quantized: Tensor  # [outputs, inputs]; of int8 in the layout of oneDNN
    scale: Tensor  # fp32: the size of a unit of each output channel
    round_rows: Callable[[Tensor], RoundedRows]  # [rows, inputs] -> each number to its nearest
    product: Callable[[RoundedRows], Tensor]  # -> [rows, outputs], with the bias

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:  # [..., inputs] -> [..., outputs]
        rounded = self.round_rows(x.flatten(0, -2))
        return self.product(rounded).to(x.dtype).view(*x.shape[:-1], self.out_features)


class Int8Linear(RoundedLinear):
    """A layer of 8-bit integers, on a CPU; its product is in float32."""

    zeros: Tensor  # [outputs] int32: the zero points, which oneDNN requires

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = even_out(linear.weight.detach().float())  # [outputs, inputs]
        scale = _scales(weight, 127)
        quantized = (weight / scale).round_().to(torch.int8)
        self.register_buffer("scale", scale.flatten())
        self.register_buffer("zeros", torch.zeros(self.out_features, dtype=torch.int32))
        self.register_buffer("quantized", torch.ops.onednn.qlinear_prepack(quantized, None))

    @staticmethod
    def round_rows(x: Tensor) -> RoundedRows:
        _, inputs = x.shape
        if x.dtype == torch.float32 and native.takes(x.dtype) and inputs % _BLOCK == 0:
            return RoundedRows(*native.round_rows(x))
        x = even_out(x)
        scale = _scales(x, 127)
        # — addcmul is vectorised where at most one operand is the same along a row; conversion
        # truncates, and no shifted value is negative
        shifted = torch.addcmul(scale.new_full((inputs,), _ZERO_POINT + 0.5), x, 1 / scale)
        return RoundedRows(shifted.to(torch.uint8), scale)

    def product(self, rows: RoundedRows) -> Tensor:
        # — oneDNN takes one scale for all rows: the rows' own are applied below
        left, right = (rows.quantized, 1.0, _ZERO_POINT), (self.quantized, self.scale, self.zeros)
        product: Tensor = _pointwise(*left, *right, None, 1.0, 0, torch.float32, "none", [], "")
        product.mul_(rows.scale)
        return product if self.bias is None else product.add_(self.bias)


class Fp8Linear(RoundedLinear):
    """A layer of 8-bit floating-point numbers of a model in bfloat16.

    ModelError if this machine has no product of them, or none of the layer's sizes.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        rows = self.round_rows(linear.weight.detach())
        self.register_buffer("quantized", rows.quantized)
        self.register_buffer("scale", rows.scale.t())
        try:
            self(linear.weight[:1])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            layer = f"a layer of {self.in_features:,} x {self.out_features:,} weights"
            fix = f"has no fp8 product here: {one_line(error)}; write dtype: auto"
            raise ModelError(f"{layer} {fix}") from error

    @staticmethod
    def round_rows(x: Tensor) -> RoundedRows:
        # — in the format of the rows, so that the quotients take no more memory than they do
        scale = _scales(x, 448).to(x.dtype)
        return RoundedRows((x / scale).to(torch.float8_e4m3fn).contiguous(), scale.float())

    def product(self, rows: RoundedRows) -> Tensor:
        quantized, scale, (count, _) = rows.quantized, rows.scale, rows.quantized.shape
        if missing := max(0, _FP8_ROWS - count):
            quantized, scale = (pad(each, (0, 0, 0, missing)) for each in (quantized, scale))
        return torch._scaled_mm(
            quantized, self.quantized.t(), scale, self.scale, self.bias, out_dtype=torch.bfloat16
        )[:count]


class RoundedProducts(Products):
    """Layers of 8-bit products that read the same rows, which are rounded once."""

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        rounded = self.layers[0].round_rows(x)
        return [layer.product(rounded).to(x.dtype) for layer in self.layers]


def round_linear(network: PreTrainedModel, rounded_to: RoundedFormat) -> None:
    """Replaces the linear layers of the decoder, in place, one after the other.

    ModelError for a machine without products of this format, and for a mixture of experts.
    """
    if rounded_to == "int8" and not any(map(torch.cpu.get_capabilities().get, _CPU_FEATURES)):
        raise ModelError(
            "dtype: int8 needs a processor with products of bytes "
            f"({', '.join(_CPU_FEATURES)}), and this one has none; write auto"
        )
    if expert_weights(network):
        raise ModelError(
            f"model family {network.config.get_text_config().model_type!r} keeps its experts' "
            "weights in one tensor, which is not rounded; write dtype: auto"
        )
    kind = Int8Linear if rounded_to == "int8" else Fp8Linear
    head = getattr(network, "lm_head", None)
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(parent, name, kind(child))


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
