"""The passes between the products of a Llama layer: norm, rotary embedding, gate, sum.

Entry point: `passes`. Kernels of one launch compute them where there are any: this package's own in
C++ (`processor.native`), or in Triton on a GPU (`triton_passes`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from subprocess import SubprocessError
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from pipeline.inference.processor import native


class Passes(NamedTuple):
    """Functions of tensors on one kind of device, as the plain ones below."""

    normalise: Callable[[Tensor, Tensor, float], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, float], None]
    gate: Callable[[Tensor, Tensor], Tensor]
    add: Callable[[Tensor, Tensor], object]


def normalise(
    x: Tensor,  # [..., hidden]
    weight: Tensor,  # [hidden]
    epsilon: float,
) -> Tensor:  # [..., hidden]
    """An RMS norm (Zhang and Sennrich, 2019), computed in float32."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = length.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
    normed: Tensor = (x * scale).to(x.dtype).mul_(weight)
    return normed


def rotate(
    x: Tensor,  # [1, rows, heads, dim]; it may be written
    cos: Tensor,  # [1, rows, dim]
    sin: Tensor,  # [1, rows, dim]
    out: Tensor,  # [1, rows, heads, dim]
    norm: Tensor | None,  # [dim]: the weight of an RMS norm of each head, which comes first
    epsilon: float,  # of this norm
) -> None:
    """Write the rotary embedding (Su et al., 2021), whose pairs are i and i + dim / 2."""
    if norm is not None:
        x = normalise(x, norm, epsilon)
    half = x.shape[-1] // 2
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])


def gate(gates: Tensor, ups: Tensor) -> Tensor:
    """SwiGLU's product (Shazeer, 2020); both [rows, inner], and the gates may be written."""
    return silu(gates, inplace=True).mul_(ups)


PLAIN = Passes(normalise, rotate, gate, Tensor.add_)


def _normalise_natively(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    out = torch.empty_like(x)
    native.normalise(x, weight, epsilon, out)
    return out


def _rotate_natively(
    x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, norm: Tensor | None, epsilon: float
) -> None:
    if norm is not None:
        native.normalise(x, norm, epsilon, x)
    native.rotate(x, cos, sin, out)


def _gate_natively(gates: Tensor, ups: Tensor) -> Tensor:
    native.gate(gates, ups)
    return gates


NATIVE = Passes(_normalise_natively, _rotate_natively, _gate_natively, native.add)


@cache
def passes(device: str, dtype: torch.dtype) -> Passes:
    """The passes on a kind of device, as `torch.device` names it."""
    if device == "cpu":
        return NATIVE if dtype in native.formats() else PLAIN
    return proved(device, dtype) if device == "cuda" else PLAIN


def proved(device: str, dtype: torch.dtype) -> Passes:
    """Triton's kernels if they work and are right on this device, and else the plain passes."""
    try:
        from triton.errors import TritonError

        from pipeline.inference.model import triton_passes
    except ImportError:  # — torch for Windows and for CPUs comes without Triton
        return PLAIN
    fused = Passes(triton_passes.normalise, triton_passes.rotate, triton_passes.gate, PLAIN.add)
    try:
        right = _largest_error(fused, device, dtype) <= 2 * torch.finfo(dtype).eps
    except (OSError, RuntimeError, SubprocessError, TritonError):
        right = False  # — no C compiler, or a GPU that Triton does not know
    return fused if right else PLAIN


@torch.inference_mode()
def _largest_error(fused: Passes, device: str, dtype: torch.dtype) -> float:
    """The largest difference from the plain passes in float32, relative to the largest number."""
    generator = torch.Generator().manual_seed(0)
    x, cos, sin, weight = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((1, 48, 6, 64), (1, 48, 64), (1, 48, 64), (64,))
    )
    answers = []
    for each, kind in ((fused, dtype), (PLAIN, torch.float32)):
        heads, *others = (tensor.to(device, kind) for tensor in (x, cos, sin, weight))
        normed = each.normalise(heads.flatten(1, 2), others[2], 1e-5)
        rotated = [torch.empty_like(heads) for _ in range(2)]
        each.rotate(heads, others[0], others[1], rotated[0], None, 0.0)
        each.rotate(heads.clone(), others[0], others[1], rotated[1], others[2], 1e-5)
        gated = each.gate(heads[0, :, 0].clone(), heads[0, :, 1].contiguous())
        answers.append([normed, *rotated, gated])
    return max(
        float((actual.float() - expected).abs().max() / expected.abs().max())
        for actual, expected in zip(*answers, strict=True)
    )
