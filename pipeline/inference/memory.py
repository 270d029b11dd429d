"""How much memory labelling takes, and how many tokens may go through the model at once.

Knows a model's shapes. Knows nothing of devices or of how much memory there is.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from pipeline.inference.labels.first_token import ROWS
from pipeline.inference.model.loaded import LoadedModel

# What may be filled of the memory that is free: the rest is for the kernels' own workspaces.
_USABLE = 0.8


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes of one batch: weights, kept prefix, activations of its tokens, logits."""

    weights_bytes: int
    prefix_bytes: int  # keys and values of the instruction, kept for the process's life
    token_bytes: int  # activations at their highest, for each token of the batch
    logits_bytes: int
    max_batch_tokens: int

    def batch_bytes(self, tokens: int) -> int:
        """Above weights and kept prefix, while a batch of so many tokens is labelled."""
        return max(tokens * self.token_bytes, self.logits_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.weights_bytes + self.prefix_bytes + self.batch_bytes(self.max_batch_tokens)


def plan_memory(
    model: LoadedModel, *, prefix_tokens: int, free_bytes: int, most_tokens: int
) -> MemoryPlan:
    """At most `most_tokens` at once, or what fits into `free_bytes` beside the loaded weights."""
    config = model.network.config.get_text_config()
    item_bytes = model.network.dtype.itemsize
    prefix = prefix_tokens * kv_bytes(model) * config.num_hidden_layers
    token = token_bytes(model)
    # The unembedding's own logits, their float32 form, and a copy while their sum is taken.
    logits = ROWS * config.vocab_size * (item_bytes * (item_bytes < 4) + 2 * 4)
    fitting = int((free_bytes * _USABLE - prefix) // token)
    return MemoryPlan(
        weights_bytes=sum(p.nbytes for p in model.network.parameters()),
        prefix_bytes=prefix,
        token_bytes=token,
        logits_bytes=logits,
        max_batch_tokens=max(1, min(most_tokens, fitting)),
    )


def kv_bytes(model: LoadedModel) -> int:
    """Keys and values of one token in one layer; grouped heads are stored once."""
    config = model.network.config.get_text_config()
    return 2 * _kv_heads(config) * head_dim(config) * model.network.dtype.itemsize


def token_bytes(model: LoadedModel) -> int:
    """Activations of one token where a layer holds most of them.

    The embedding and the layer's input stay for the whole of it, and the angles' cosines and
    sines. Beside them stand, in attention, the normalised input and three and a half times the
    queries and keys, while they are rotated; in the feed-forward also the residual, and three
    inner states. Experts hold their tokens' copies besides.
    """
    config = model.network.config.get_text_config()
    hidden, dim = config.hidden_size, head_dim(config)
    attention = 3 * hidden + 7 * (config.num_attention_heads + _kv_heads(config)) * dim // 2
    inner = getattr(config, "moe_intermediate_size", None)
    if inner:
        chosen = getattr(config, "num_experts_per_tok", None) or 1
        feed_forward = 4 * hidden + chosen * (3 * inner + 2 * hidden)
    else:
        feed_forward = 4 * hidden + 3 * _inner_size(config)
    return int((2 * dim + max(attention, feed_forward)) * model.network.dtype.itemsize)


def _inner_size(config: object) -> int:
    return int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)  # type: ignore[attr-defined]


def head_dim(config: object) -> int:
    heads: int = config.num_attention_heads  # type: ignore[attr-defined]
    hidden: int = config.hidden_size  # type: ignore[attr-defined]
    return int(getattr(config, "head_dim", None) or hidden // heads)


def _kv_heads(config: object) -> int:
    heads: int = config.num_attention_heads  # type: ignore[attr-defined]
    return int(getattr(config, "num_key_value_heads", None) or heads)


# From glibc's malloc.h: how much free memory at the heap's end goes back to the system, and from
# what size on a block is mapped apart.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = (1 << 31) - 1, 1 << 25  # the most that every glibc takes


def disable_malloc_trim() -> bool:
    """Stop the allocator from giving activations back, for this process; False without glibc.

    They would be mapped anew, and so zeroed page by page, in every layer: 0.4 of 4.8 seconds of
    processor time a document of 1,000 tokens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trimmed = mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(_TRIM_BYTES))
    return bool(mallopt(_M_MMAP_THRESHOLD, ctypes.c_int(_MMAP_BYTES)) and trimmed)


def trim_malloc() -> None:
    """Return what is free now to the system; the settings stay."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
