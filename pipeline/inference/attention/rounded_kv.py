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
class _Span:
    """The keys, or the values, of consecutive tokens of one layer."""

    quantized: Tensor  # [tokens, kv_heads, dim] int8
    step: Tensor  # [tokens, kv_heads, 1] fp32

    @classmethod
    def of(
        cls,
        x: Tensor,  # [tokens, kv_heads, dim]
    ) -> _Span:
        _tokens, _kv_heads, _dim = x.shape
        step = (x.abs().amax(dim=-1, keepdim=True).float() / 127).clamp_(min=_SMALLEST_STEP)
        return cls((x / step).round_().to(torch.int8), step)


@dataclass(frozen=True, slots=True)
class RoundedKV:
    """The keys and values of one layer, of spans that were rounded one after the other."""

    keys: tuple[_Span, ...]
    values: tuple[_Span, ...]
    dtype: torch.dtype  # that a layer reads them in

    @classmethod
    def of(cls, kv: LayerKV) -> RoundedKV:
        """The keys and values in 8 bits."""
        return cls((_Span.of(kv.k),), (_Span.of(kv.v),), kv.k.dtype)

    def followed_by(self, other: RoundedKV) -> RoundedKV:
        """Both spans; nothing is rounded again, or copied."""
        return RoundedKV(self.keys + other.keys, self.values + other.values, self.dtype)

    def widened(self) -> LayerKV:
        """What a layer reads: [tokens, kv_heads, dim] each."""
        keys, values = (
            [(span.quantized * span.step).to(self.dtype) for span in spans]
            for spans in (self.keys, self.values)
        )
        return LayerKV(k=torch.cat(keys), v=torch.cat(values))
