"""The operations of a Llama layer in Triton, each of which reads and writes its rows once.

They take the tensors of `operations.Operations`, and compute in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_GATED = 4_096  # numbers of one program of the gate
_OF_WARP = 512  # numbers of one warp


@triton.jit
def _normalise(x, weight, out, x_row, epsilon, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, PADDED)
    values = tl.load(x + row * x_row + n, mask=n < WIDTH, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + epsilon)
    normed = values * scale * tl.load(weight + n, mask=n < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + n, normed.to(out.dtype.element_ty), mask=n < WIDTH)


@triton.jit
def _rotate(
    x, weight, cos, sin, x_row, place_row, epsilon,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, n = tl.arange(0, PADDED_HEADS)[:, None], tl.arange(0, PADDED_HALF)[None, :]
    at = head * 2 * HALF + n
    inside = (head < HEADS) & (n < HALF)
    first = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + row * x_row + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + epsilon)[:, None]
        first *= scale * tl.load(weight + n, mask=n < HALF, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight + n + HALF, mask=n < HALF, other=0.0).to(tl.float32)
    places = row * place_row + n
    first_cos = tl.load(cos + places, mask=n < HALF, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + places + HALF, mask=n < HALF, other=0.0).to(tl.float32)
    first_sin = tl.load(sin + places, mask=n < HALF, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + places + HALF, mask=n < HALF, other=0.0).to(tl.float32)
    kind = x.dtype.element_ty
    rotated = x + row * x_row + at
    tl.store(rotated, (first * first_cos - second * first_sin).to(kind), mask=inside)
    tl.store(rotated + HALF, (second * second_cos + first * second_sin).to(kind), mask=inside)


@triton.jit
def _gate(gates, ups, numbers, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gates + at, mask=at < numbers, other=0.0).to(tl.float32)
    up = tl.load(ups + at, mask=at < numbers, other=0.0).to(tl.float32)
    gated = gate * tl.sigmoid(gate) * up
    tl.store(gates + at, gated.to(gates.dtype.element_ty), mask=at < numbers)


def normalise(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """An RMS norm; the rows of x may be apart."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    out = x.new_empty(x.shape)
    with torch.cuda.device_of(x):
        _normalise[(len(rows),)](
            *(rows, weight, out, rows.stride(0), epsilon),
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
            num_warps=_warps(width),
        )
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, epsilon: float) -> None:
    """The RMS norm of each head, if there is one, and the rotary embedding, in place."""
    rows, heads, dim = x.shape
    with torch.cuda.device_of(x):
        _rotate[(rows,)](
            *(x, x if norm is None else norm, cos, sin),
            *(x.stride(0), cos.stride(0), epsilon),
            HEADS=heads,
            PADDED_HEADS=triton.next_power_of_2(heads),
            HALF=dim // 2,
            PADDED_HALF=triton.next_power_of_2(dim // 2),
            NORMED=norm is not None,
            num_warps=_warps(heads * dim),
        )


def gate(gates: Tensor, ups: Tensor) -> Tensor:
    """SwiGLU's product, in the place of the gates; both contiguous."""
    with torch.cuda.device_of(gates):
        _gate[(triton.cdiv(gates.numel(), _GATED),)](
            gates, ups, gates.numel(), BLOCK=_GATED, num_warps=_warps(_GATED)
        )
    return gates


def _warps(numbers: int) -> int:
    """The warps of a program that reads this number of values: a power of two."""
    return int(min(16, triton.next_power_of_2(triton.cdiv(numbers, _OF_WARP))))
