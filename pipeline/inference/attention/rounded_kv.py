"""Cached keys and values in 8 bits: `model.kv`. Entry point: `RoundedKV`.

A step is the same for one head of one token. Keys are rounded as they are kept, with their
positions. They are widened where a layer reads them, so the products are those of the model's own
number format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.inference.attention.reference import LayerKV

_SMALLEST_STEP = torch.finfo(torch.float32).tiny  # of zeros


@dataclass(frozen=True, slots=True)
class RoundedKV:
    """The keys and values of one layer."""

    quantized: LayerKV  # int8
    steps: LayerKV  # fp32, [tokens, kv_heads, 1] each
    dtype: torch.dtype  # that a layer reads them in

    @classmethod
    def of(cls, kv: LayerKV) -> RoundedKV:
        """The keys and values in 8 bits."""
        steps = LayerKV(_steps(kv.k), _steps(kv.v))
        pairs = (kv.k, steps.k), (kv.v, steps.v)
        rounded = ((x / step).round_().to(torch.int8) for x, step in pairs)
        return cls(LayerKV(*rounded), steps, kv.k.dtype)

    def followed_by(self, other: RoundedKV) -> RoundedKV:
        """Both spans; nothing is rounded again."""
        quantized = self.quantized.followed_by(other.quantized)
        return RoundedKV(quantized, self.steps.followed_by(other.steps), self.dtype)

    def widened(self) -> LayerKV:
        """What a layer reads."""
        pairs = (self.quantized.k, self.steps.k), (self.quantized.v, self.steps.v)
        return LayerKV(*((x * step).to(self.dtype) for x, step in pairs))


def _steps(x: Tensor) -> Tensor:  # [tokens, kv_heads, dim] -> [tokens, kv_heads, 1] fp32
    return (x.abs().amax(dim=-1, keepdim=True).float() / 127).clamp_(min=_SMALLEST_STEP)
