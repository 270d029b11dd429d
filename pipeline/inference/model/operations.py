"""What a Llama layer computes between its products: norm, rotary embedding, gate.

Entry points: `operations_for`, which lists the ways on a device, and `PLAIN`. Each of the others is
one kernel: this package's own in C++ (`processor.native`), or in Triton (`triton_operations`). That
a model is right with them is proved when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from pipeline.inference.processor import native


class Operations(NamedTuple):
    """Functions of tensors on one kind of device, as the plain ones below."""

    normalise: Callable[[Tensor, Tensor, float], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], None]
    gate: Callable[[Tensor, Tensor], Tensor]


def normalise(
    x: Tensor,  # [rows, hidden]
    weight: Tensor,  # [hidden]
    epsilon: float,
) -> Tensor:  # [rows, hidden]
    """An RMS norm (Zhang and Sennrich, 2019), computed in float32."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = length.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
    normed: Tensor = (x * scale).to(x.dtype).mul_(weight)
    return normed


def rotate(
    x: Tensor,  # [rows, heads, dim], with heads beside one another; it is written
    cos: Tensor,  # [rows, dim]
    sin: Tensor,  # [rows, dim]
    norm: Tensor | None,  # [dim]: the weight of an RMS norm of each head, which comes first
    epsilon: float,  # of this norm
) -> None:
    """The rotary embedding (Su et al., 2021), in place; its pairs are i and i + dim / 2."""
    own = x.clone() if norm is None else normalise(x, norm, epsilon)
    half = x.shape[-1] // 2
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    torch.mul(own, cos, out=x)
    x[..., :half].addcmul_(own[..., half:], sin[..., :half], value=-1)
    x[..., half:].addcmul_(own[..., :half], sin[..., half:])


def gate(gates: Tensor, ups: Tensor) -> Tensor:
    """SwiGLU's product (Shazeer, 2020); both [rows, inner], contiguous; the gates are written."""
    return silu(gates, inplace=True).mul_(ups)


PLAIN = Operations(normalise, rotate, gate)


def operations_for(device: torch.device, dtype: torch.dtype) -> list[Operations]:
    """The ways on this device and in this number format, the fastest first."""
    if device.type == "cpu" and native.takes(dtype):
        return [Operations(native.normalise, native.rotate, native.gate)]
    if device.type == "cuda":
        try:
            from pipeline.inference.model import triton_operations as kernels
        except ImportError:  # — torch for Windows and for CPUs comes without Triton
            return [PLAIN]
        return [Operations(kernels.normalise, kernels.rotate, kernels.gate), PLAIN]
    return [PLAIN]
