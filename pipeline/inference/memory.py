"""How much memory labelling takes, and how glibc's malloc is kept from returning it every layer.

Entry points: `ModelShape`, from a model's configuration; `plan_memory`, from a loaded model and the
free bytes; `disable_malloc_trim`, once a process. Must not import torch: the driver plans, too.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import computed_field

if TYPE_CHECKING:
    from pipeline.inference.model.loaded import LoadedModel

# Larger batches do not use two cores better, and their activations no longer fit in the cache:
# 1,000-token documents took 2.5 s each in batches of one, 2.8 s in batches of two or four.
CPU_BATCH_TOKENS = 1_280
ENCODER_BATCH_TOKENS = 4_096  # on a CPU
# Families whose layers have the Llama form, which `LlamaDecoder` computes.
LLAMA_FORM = {"llama", "mistral", "qwen2", "qwen3", "qwen3_vl_text"}
# Rows that it reads at once, on a CPU and on a GPU: of a longer document the attention alone takes
# more. On a CPU a batch of short documents is never above it.
BLOCK_ROWS, GPU_BLOCK_ROWS = 2_048, 65_536
# Rows whose logits are in memory at once, on a CPU and on a GPU: 128 x 150,000 x 4 bytes = 77 MB. A
# GPU reads the unembedding again for each part.
LOGIT_ROWS, GPU_LOGIT_ROWS = 128, 2_048
# Copies of a cache with recurrent states that are in memory at once, at most: those of 24 layers of
# 32 heads of 128 x 128 numbers of 4 bytes take 50 MB each.
CACHE_COPIES = 16
# The share of free memory that a batch may use; the rest is for the kernels' own workspaces.
USABLE = 0.8


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder or encoder that its memory depends on."""

    hidden: int
    dim: int  # of one head
    heads: int
    kv_heads: int
    inner: int  # numbers of one token that the feed-forward holds, beside the layer's states
    layers: int
    vocab: int
    item_bytes: int  # of the number format
    block_rows: int | None = None  # of the Llama form; None: the family's own layers
    logit_rows: int = LOGIT_ROWS

    @classmethod
    def of(cls, config: Any, *, item_bytes: int, on_cpu: bool) -> ModelShape:
        """The shape that a model's text configuration states; AttributeError if it states none."""

        def largest(name: str) -> int:  # of all layers; 0 if it is not stated
            value = getattr(config, name, None) or 0
            return int(max(value) if isinstance(value, list) else value)

        hidden, heads = config.hidden_size, largest("num_attention_heads") or 1
        inner = 3 * (largest("intermediate_size") or 4 * hidden)
        if of_expert := largest("moe_intermediate_size"):
            # — a mixture of experts copies a token for each chosen expert
            inner = max(1, largest("num_experts_per_tok")) * (3 * of_expert + 2 * hidden)
        block_rows = BLOCK_ROWS if on_cpu else GPU_BLOCK_ROWS
        is_llama = getattr(config, "model_type", None) in LLAMA_FORM
        return cls(
            hidden=hidden,
            dim=largest("head_dim") or hidden // heads,
            heads=heads,
            kv_heads=largest("num_key_value_heads") or heads,
            inner=inner,
            layers=config.num_hidden_layers,
            vocab=config.vocab_size,
            item_bytes=item_bytes,
            block_rows=block_rows if is_llama else None,
            logit_rows=LOGIT_ROWS if on_cpu else GPU_LOGIT_ROWS,
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token in one layer; grouped heads are stored once."""
        return 2 * self.kv_heads * self.dim * self.item_bytes

    def batch_bytes(self, tokens: int) -> int:
        """Peak bytes of the activations of a batch, which one layer or the logits need.

        The cosines and sines of the rotary embedding are held throughout.
        """
        hidden, dim = self.hidden, self.dim
        queries, kept = self.heads * dim, (self.heads + 2 * self.kv_heads) * dim
        if self.block_rows is None:
            # — the embedding and the layer's input; in the attention the normalised input, and 3.5
            # times the queries and keys while they are rotated; in the feed-forward the same input,
            # the residual, the output, and inner states
            attention = hidden + 7 * (self.heads + self.kv_heads) * dim // 2
            layer = tokens * (2 * hidden + max(attention, 2 * hidden + self.inner))
        else:
            # — the layer's input, which becomes its output; queries, keys and values, and of a
            # block their input and themselves; or those, the attention, and a head's keys and
            # values in the layout of the products; or the attention, and of a block the output,
            # the feed-forward's input and output, and two of its inner states
            rows = min(tokens, self.block_rows)
            layer = tokens * hidden + max(
                tokens * kept + (rows * (hidden + kept) if rows < tokens else 0),
                tokens * (kept + queries + 2 * dim),
                tokens * queries + rows * (3 * hidden + 2 * self.inner // 3),
            )
        # — the unembedding's own logits, their float32 form, and a copy while their sum is taken
        narrow = self.item_bytes if self.item_bytes < 4 else 0
        logits_bytes = min(tokens, self.logit_rows) * self.vocab * (narrow + 2 * 4)
        return max((tokens * 2 * dim + layer) * self.item_bytes, logits_bytes)

    def engine_bytes(self, *, kept_tokens: int, tokens: int) -> int:
        """The bytes to have free for kept keys and values, and batches of up to `tokens`."""
        kept = kept_tokens * self.kv_bytes * self.layers
        return int((self.batch_bytes(tokens) + kept) / USABLE)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes of one batch: weights, kept prefix, activations of its tokens, logits."""

    weights_bytes: int
    prefix_bytes: int  # keys and values of the instruction, kept for the process's life
    shape: ModelShape
    max_batch_tokens: int

    @computed_field
    @property
    def peak_bytes(self) -> int:
        return (
            self.weights_bytes + self.prefix_bytes + self.shape.batch_bytes(self.max_batch_tokens)
        )


def plan_memory(
    model: LoadedModel, *, prefix_tokens: int, free_bytes: int, most_tokens: int
) -> MemoryPlan:
    """Batches of at most `most_tokens` tokens that fit into `free_bytes` beside the weights."""
    shape = shape_of(model)
    if model.schedule == "staged":
        free_bytes //= 2  # — `cache_copies` has the other half
    prefix = prefix_tokens * shape.kv_bytes * shape.layers
    if model.kv != "none":
        # — a byte for each number, and four for each head of a token
        prefix = prefix_tokens * 2 * shape.kv_heads * (shape.dim + 4) * shape.layers
        # — a layer reads its part widened, by way of float32 and of one span after the other
        free_bytes -= prefix_tokens * shape.kv_bytes * (1 + 2 * 4 // shape.item_bytes)
    usable = free_bytes * USABLE - prefix
    return MemoryPlan(
        weights_bytes=sum(
            weights.nbytes for weights in (*model.network.parameters(), *model.network.buffers())
        ),
        prefix_bytes=prefix,
        shape=shape,
        max_batch_tokens=max(
            1, bisect_right(range(1, most_tokens + 1), usable, key=shape.batch_bytes)
        ),
    )


def shape_of(model: LoadedModel) -> ModelShape:
    """The shape of a loaded decoder."""
    return ModelShape.of(
        model.network.config.get_text_config(),
        item_bytes=model.network.dtype.itemsize,
        on_cpu=model.device.type == "cpu",
    )


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
