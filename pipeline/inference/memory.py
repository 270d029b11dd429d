"""How much memory labelling takes, and how glibc's malloc is kept from returning it every layer.

Entry points: `plan_memory`, from the model's shapes and the free bytes; `disable_malloc_trim`, once
a process.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from pipeline.inference.attention.rounded_kv import BLOCK_TOKENS
from pipeline.inference.labels.scoring import ROWS
from pipeline.inference.model.loaded import LoadedModel

# The share of free memory that a batch may use; the rest is for the kernels' own workspaces.
_USABLE = 0.8


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes of one batch: weights, kept prefix, activations of its tokens, logits."""

    weights_bytes: int
    prefix_bytes: int  # keys and values of the instruction, kept for the process's life
    token_bytes: int  # peak activations, for each token of the batch
    logits_bytes: int
    max_batch_tokens: int

    def batch_bytes(self, tokens: int) -> int:
        """Peak bytes of labelling a batch, without weights and kept prefix."""
        return max(tokens * self.token_bytes, self.logits_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.weights_bytes + self.prefix_bytes + self.batch_bytes(self.max_batch_tokens)


def plan_memory(
    model: LoadedModel, *, prefix_tokens: int, free_bytes: int, most_tokens: int
) -> MemoryPlan:
    """Batches of at most `most_tokens` tokens that fit into `free_bytes` beside the weights."""
    config = model.network.config.get_text_config()
    item_bytes = model.network.dtype.itemsize
    prefix = prefix_tokens * kv_bytes(model) * config.num_hidden_layers
    if model.kv != "none":
        blocks = -(-prefix_tokens // BLOCK_TOKENS)
        # — a byte for each number, and four for each head of a block
        sizes = 4 * blocks * 2 * _kv_heads(config) * config.num_hidden_layers
        prefix = prefix // item_bytes + sizes
        # — a layer reads its part widened, by way of two copies in float32
        free_bytes -= prefix_tokens * kv_bytes(model) * (1 + 2 * 4 // item_bytes)
    token = token_bytes(model)
    # The unembedding's own logits, their float32 form, and a copy while their sum is taken.
    logits = ROWS * config.vocab_size * (item_bytes * (item_bytes < 4) + 2 * 4)
    batch_tokens = int((free_bytes * _USABLE - prefix) // token)
    return MemoryPlan(
        weights_bytes=sum(
            weights.nbytes for weights in (*model.network.parameters(), *model.network.buffers())
        ),
        prefix_bytes=prefix,
        token_bytes=token,
        logits_bytes=logits,
        max_batch_tokens=max(1, min(most_tokens, batch_tokens)),
    )


def kv_bytes(model: LoadedModel) -> int:
    """Bytes of the keys and values of one token in one layer; grouped heads are stored once."""
    config = model.network.config.get_text_config()
    return 2 * _kv_heads(config) * head_dim(config) * model.network.dtype.itemsize


def token_bytes(model: LoadedModel) -> int:
    """Peak bytes of one token's activations in a layer.

    The embedding, the layer's input, and the cosines and sines of the rotary embedding are held
    throughout. Attention adds the normalised input, and 3.5 times the queries and keys while they
    are rotated. The feed-forward adds the normalised input, the residual and three inner states;
    a mixture of experts also adds copies of the token, one for each chosen expert.
    """
    config = model.network.config.get_text_config()
    hidden, dim = config.hidden_size, head_dim(config)
    attention = 3 * hidden + 7 * (config.num_attention_heads + _kv_heads(config)) * dim // 2
    if inner := getattr(config, "moe_intermediate_size", None):
        chosen = getattr(config, "num_experts_per_tok", None) or 1
        feed_forward = 4 * hidden + chosen * (3 * inner + 2 * hidden)
    else:
        inner = getattr(config, "intermediate_size", None) or 4 * hidden
        feed_forward = 4 * hidden + 3 * inner
    return int((2 * dim + max(attention, feed_forward)) * model.network.dtype.itemsize)


def head_dim(config: Any) -> int:
    """Of a model's text configuration."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


# Parameters of mallopt(3): the free bytes at the heap's top from which on malloc trims it, and the
# size from which on malloc maps a block separately.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = (1 << 31) - 1, 1 << 25  # the largest that every glibc accepts


def disable_malloc_trim() -> bool:
    """Keep freed activations in this process; False without glibc.

    Else malloc returns them to the system and every layer maps them again, zeroed page by page:
    0.4 of 4.8 seconds of CPU time for a document of 1,000 tokens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trimmed = mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(_TRIM_BYTES))
    return bool(mallopt(_M_MMAP_THRESHOLD, ctypes.c_int(_MMAP_BYTES)) and trimmed)


def trim_malloc() -> None:
    """Return memory that is free now to the system; the settings stay."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
