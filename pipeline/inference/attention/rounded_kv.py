"""Cached keys and values in 8 bits: `model.kv`. Entry point: `RoundedKV`.

A step is the same for one head and a block of tokens. Keys are rounded as they are kept, with their
positions. They are widened where a layer reads them, so the products are those of the model's own
number format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipeline.inference.attention.reference import LayerKV
from pipeline.inference.memory import KV_BLOCK_TOKENS

_LARGEST = 127.0  # steps
_SMALLEST_STEP = torch.finfo(torch.float32).tiny  # of a block of zeros


@dataclass(frozen=True, slots=True)
class _Span:
    """The keys, or the values, of consecutive tokens of one layer."""

    quantized: Tensor  # [tokens, kv_heads, dim] int8
    scale: Tensor  # [blocks, kv_heads] fp32: what one step is

    @classmethod
    def of(
        cls,
        x: Tensor,  # [tokens, kv_heads, dim]
    ) -> _Span:
        tokens, heads, dim = x.shape
        padded = pad(x.float(), (0, 0, 0, 0, 0, -tokens % KV_BLOCK_TOKENS))
        blocks = padded.view(-1, KV_BLOCK_TOKENS, heads, dim)
        scale = (blocks.abs().amax(dim=(1, 3)) / _LARGEST).clamp_(min=_SMALLEST_STEP)
        assert scale.shape == (-(-tokens // KV_BLOCK_TOKENS), heads), scale.shape
        scaled = (blocks / scale[:, None, :, None]).flatten(0, 1)[:tokens]
        return cls(scaled.round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8), scale)

    def widened(self, dtype: torch.dtype) -> Tensor:  # [tokens, kv_heads, dim]
        scale = self.scale.repeat_interleave(KV_BLOCK_TOKENS, dim=0)[: len(self.quantized), :, None]
        return (self.quantized.float() * scale).to(dtype)


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
            [span.widened(self.dtype) for span in spans] for spans in (self.keys, self.values)
        )
        return LayerKV(k=torch.cat(keys), v=torch.cat(values))
