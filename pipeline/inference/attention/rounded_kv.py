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

    quantized: Tensor  # [2, tokens, kv_heads, dim] int8: keys, values
    steps: Tensor  # [2, tokens, kv_heads, 1] fp32
    dtype: torch.dtype  # that a layer reads them in

    @classmethod
    def of(cls, kv: LayerKV) -> RoundedKV:
        """The keys and values in 8 bits."""
        both = torch.stack([kv.k, kv.v])
        steps = (both.abs().amax(dim=-1, keepdim=True).float() / 127).clamp_(min=_SMALLEST_STEP)
        return cls((both / steps).round_().to(torch.int8), steps, both.dtype)

    def followed_by(self, other: RoundedKV) -> RoundedKV:
        """Both spans; nothing is rounded again."""
        quantized = torch.cat([self.quantized, other.quantized], dim=1)
        return RoundedKV(quantized, torch.cat([self.steps, other.steps], dim=1), self.dtype)

    def widened(self) -> LayerKV:
        """What a layer reads."""
        return LayerKV(*(self.quantized * self.steps).to(self.dtype))
