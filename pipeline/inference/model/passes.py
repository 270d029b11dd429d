"""The passes between the products of a Llama layer: norm, rotary embedding, gate.

Entry point: `passes`, compiled by torch where that makes one kernel of several. On a CPU assay's
own kernels take their place (`processor.native`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from subprocess import SubprocessError
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu


class Passes(NamedTuple):
    """Functions of tensors on any device."""

    normalise: Callable[[Tensor, Tensor, float], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    gate: Callable[[Tensor, Tensor], Tensor]


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
    x: Tensor,  # [1, rows, heads, dim]
    cos: Tensor,  # [1, rows, dim]
    sin: Tensor,  # [1, rows, dim]
    out: Tensor,  # [1, rows, heads, dim]
) -> None:
    """Write the rotary embedding (Su et al., 2021), whose pairs are i and i + dim / 2."""
    half = x.shape[-1] // 2
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])


def gate(gates: Tensor, ups: Tensor) -> Tensor:
    """SwiGLU's product (Shazeer, 2020); both [rows, inner]."""
    return silu(gates).mul_(ups)


PLAIN = Passes(normalise, rotate, gate)


@cache
def passes(device: str, dtype: torch.dtype, *, compiled_on: str = "cuda") -> Passes:
    """The passes on a kind of device; compiled if that works, and is right, on `compiled_on`."""
    if device != compiled_on:
        return PLAIN
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # — no pool of processes
    compiler: Any = torch.compile
    compiled = Passes(*(compiler(each, dynamic=True) for each in PLAIN))
    try:
        right = _largest_error(compiled, device, dtype) <= 2 * torch.finfo(dtype).eps
    except (ImportError, OSError, RuntimeError, SubprocessError):
        right = False  # — torch has no compiler for this device here: the plain ones do the same
    return compiled if right else PLAIN


@torch.inference_mode()
def _largest_error(compiled: Passes, device: str, dtype: torch.dtype) -> float:
    """The largest difference from the plain passes in float32, relative to the largest number."""
    generator = torch.Generator().manual_seed(0)
    x, cos, sin, weight = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((1, 48, 6, 64), (1, 48, 64), (1, 48, 64), (64,))
    )
    answers = []
    for each, kind in ((compiled, dtype), (PLAIN, torch.float32)):
        own = [tensor.to(device, kind) for tensor in (x, cos, sin, weight)]
        rotated = torch.empty_like(own[0])
        each.rotate(own[0], own[1], own[2], rotated)
        gated = each.gate(own[0].flatten(0, 2), own[0].flatten(0, 2))
        # — as heads, as rows of a block, and as one row, each of which is compiled by itself
        shapes = own[0], own[0].flatten(1, 2), own[0][0, 0], own[0][0, 0, :1]
        normed = [each.normalise(states, own[3], 1e-5) for states in shapes]
        answers.append([*normed, rotated, gated])
    return max(
        float((actual.float() - expected).abs().max() / expected.abs().max())
        for actual, expected in zip(*answers, strict=True)
    )
