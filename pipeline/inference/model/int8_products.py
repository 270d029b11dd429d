"""Linear layers that multiply 8-bit integers: `dtype: int8`.

Entry point: `round_linear`.

A weight has one scale for each output channel and is rounded once. An activation has one scale for
each token, computed in every forward, so a row of a product does not depend on the other rows of
its batch. Sums of integers are exact. This is the vector-wise quantisation of LLM.int8() (Dettmers
et al., 2022). A few columns of the activations are much larger than the others, and would take most
of the 127 steps: so both sides are first multiplied by Hadamard matrices of blocks of columns,
which leaves the product as it is and evens out its columns (QuaRot: Ashkboos et al., 2024). The
embedding and the unembedding keep their format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.errors import ModelError
from pipeline.inference.model.linear import Products
from pipeline.inference.processor import native

# Instructions that multiply unsigned by signed bytes and add in 32 bits. Without them oneDNN adds
# pairs of products in 16 bits, which overflow.
_CPU_FEATURES = ("avx512_vnni", "avx_vnni", "amx_int8", "i8mm")
_ZERO_POINT = 128  # on a CPU, activations of -127 to 127 steps are the bytes 1 to 255
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of a row of zeros
_CUDA_ROWS = 17  # torch._int_mm takes no fewer on CUDA
# Columns of a block. SmolLM2's states after layers 8, 16 and 30 are off by .095, .115 and .137 of
# their norm without blocks, by .038, .050 and .054 with 16, by .033, .043 and .053 with 32, and by
# .032, .040 and .055 with 64 columns, which take twice as long as 32.
_BLOCK = native.ROUNDED_TOGETHER


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Activations in steps of 1/127 of each row's largest magnitude."""

    quantized: Tensor  # [rows, inputs]: uint8, shifted by _ZERO_POINT, on a CPU; int8 on CUDA
    scale: Tensor  # [rows, 1] fp32: the size of a step


@cache
def _hadamard(columns: int, device: torch.device) -> Tensor:  # [columns, columns]
    """The orthonormal Hadamard matrix of a power of two (Sylvester's construction)."""
    signs = torch.ones(1, 1, device=device)
    while len(signs) < columns:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    matrix: Tensor = signs / columns**0.5
    return matrix


def even_out(
    x: Tensor,  # [rows, inputs]
) -> Tensor:  # [rows, inputs]
    """The rows in a basis in which no column is much larger than those beside it.

    The same basis for all tensors of as many inputs.
    """
    _rows, inputs = x.shape
    block = min(_BLOCK, inputs & -inputs)  # — the largest power of two that divides it
    matrix = _hadamard(block, x.device).to(x.dtype)
    return (x.reshape(-1, block) @ matrix).view(x.shape)


def round_rows(
    x: Tensor,  # [rows, inputs]
) -> RoundedRows:
    """The rows evened out and in 8 bits, each rounded to its nearest step."""
    rows, inputs = x.shape
    on_cpu = x.device.type == "cpu" and x.dtype == torch.float32
    if on_cpu and native.takes(x.dtype) and inputs % native.ROUNDED_TOGETHER == 0:
        return RoundedRows(*native.round_rows(x))
    x = even_out(x)
    # — amax and amin are vectorised; aminmax takes seven times as long
    largest = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
    scale = (largest.float() / 127).clamp_(min=_SMALLEST_SCALE)
    assert scale.shape == (rows, 1), f"{scale.shape} scales of {rows} rows"
    shift = _ZERO_POINT + 0.5 if x.device.type == "cpu" else 0.5
    # — addcmul is vectorised where at most one operand is the same along a row
    shifted = torch.addcmul(scale.new_full((inputs,), shift), x, 1 / scale)
    if x.device.type == "cpu":  # — conversion truncates, and no shifted value is negative
        return RoundedRows(shifted.to(torch.uint8), scale)
    return RoundedRows(shifted.floor_().to(torch.int8), scale)


class Int8Linear(nn.Module):
    """A linear layer whose weights and activations are multiplied as 8-bit integers."""

    scale: Tensor  # [outputs] fp32: the size of a step of each output channel
    quantized: Tensor  # [outputs, inputs] int8; on a CPU in the layout of oneDNN
    zero_points: Tensor  # [outputs] int32: zeros, which oneDNN asks for

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight = even_out(linear.weight.detach().float())  # [outputs, inputs]
        scale = (weight.abs().amax(-1) / 127).clamp_(min=_SMALLEST_SCALE)
        quantized = (weight / scale[:, None]).round_().to(torch.int8)
        self.register_buffer("scale", scale)
        self.register_buffer("zero_points", torch.zeros_like(scale, dtype=torch.int32))
        if quantized.device.type == "cpu":
            quantized = torch.ops.onednn.qlinear_prepack(quantized, None)
        self.register_buffer("quantized", quantized)

    def forward(
        self,
        x: Tensor,  # [..., inputs]
    ) -> Tensor:  # [..., outputs]
        rounded = round_rows(x.flatten(0, -2))
        return self.product(rounded).to(x.dtype).view(*x.shape[:-1], self.out_features)

    def product(self, rows: RoundedRows) -> Tensor:  # [rows, outputs] fp32
        """The product with activations that are rounded already, and the bias."""
        on_cpu = rows.quantized.dtype == torch.uint8
        product = self._of_bytes(rows) if on_cpu else self._of_integers(rows)
        return product if self.bias is None else product.add_(self.bias)

    def _of_bytes(self, rows: RoundedRows) -> Tensor:  # [rows, outputs] fp32
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            rows.quantized,
            1.0,  # — oneDNN takes one scale for all rows: the rows' own are applied below
            _ZERO_POINT,
            self.quantized,
            self.scale,
            self.zero_points,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return product.mul_(rows.scale)

    def _of_integers(self, rows: RoundedRows) -> Tensor:  # [rows, outputs] fp32
        count, _ = rows.quantized.shape
        quantized = nn.functional.pad(rows.quantized, (0, 0, 0, max(0, _CUDA_ROWS - count)))
        sums = torch._int_mm(quantized, self.quantized.t())[:count]  # int32
        return sums * rows.scale * self.scale


class Int8Products(Products):
    """Layers of 8-bit products that read the same rows, which are rounded once."""

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        rounded = round_rows(x)
        return [layer.product(rounded).to(x.dtype) for layer in self._layers]


def round_linear(network: PreTrainedModel, device: str) -> None:
    """Replaces the linear layers of the decoder, in place, one after the other.

    ModelError for a processor without products of bytes, and for a mixture of experts.
    """
    if device == "cpu" and not any(map(torch.cpu.get_capabilities().get, _CPU_FEATURES)):
        raise ModelError(
            "dtype: int8 needs a processor with products of bytes "
            f"({', '.join(_CPU_FEATURES)}), and this one has none; write auto"
        )
    if expert_weights(network):
        raise ModelError(
            f"model family {network.config.get_text_config().model_type!r} keeps its experts' "
            "weights in one tensor, which is not rounded; write dtype: auto"
        )
    head = getattr(network, "lm_head", None)
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(parent, name, Int8Linear(child))


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
