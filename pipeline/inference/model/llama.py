"""The decoder of the Llama form, on every device and in every number format.

Entry point: `LlamaDecoder`, for the families Llama, Mistral, Qwen2, Qwen3 and the text of Qwen3-VL.
It reads the weights, biases, norms, windows and rotary embedding of the family's own modules, which
stay as they are. The deepest layer of a batch is computed at the rows of answers alone. All but the
attention takes a block of rows at a time, so that a long document needs the inner states of one
block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.inference.attention.hook import TreeAttention
from pipeline.inference.attention.reference import LayerKV
from pipeline.inference.memory import BLOCK_ROWS, GPU_BLOCK_ROWS, LLAMA_FORM
from pipeline.inference.model.linear import FusedProducts, Products
from pipeline.inference.model.operations import Operations
from pipeline.inference.model.rounded_products import RoundedLinear, RoundedProducts

# Rows of a block on a CPU whose inner states stay in the cache from one product to the next. On a
# Xeon of model 167 a document of 1,000 tokens took .82 s in 8 bits with 256 rows, .78 with 384 and
# .85 with 512. Thirty layers in bfloat16 took .57 s on a thread of a Xeon with AMX with 256 to 608
# rows, and .65 without blocks. In float32, on a Xeon of model 207, a document took .99 with blocks
# and .96 without.
INT8_ROWS, BFLOAT16_ROWS = 384, 512


class LlamaDecoder:
    """A family's decoder, run by this module: h + attention(norm(h)), then h + mlp(norm(h))."""

    def __init__(self, decoder: Any, operations: Operations) -> None:
        self._decoder, self.operations = decoder, operations
        self._layers = [_LlamaLayer(layer, operations) for layer in decoder.layers]

    def run(
        self,
        layers: Collection[int],
        on_states: Callable[[int, Tensor], None],  # a layer, and its states [1, rows, hidden]
        *,
        tree: TreeAttention,
        position_ids: Tensor,  # [1, rows], or [axes, 1, rows]
        input_ids: Tensor | None = None,  # [1, rows]
        inputs_embeds: Tensor | None = None,  # [1, rows, hidden]
        visual_pos_masks: Tensor | None = None,  # [1, rows] bool
        deepstack_visual_embeds: Sequence[Tensor] = (),  # by layer: [image rows, hidden]
        use_cache: bool = False,
    ) -> None:
        """Runs to the deepest of these layers, and gives each one's states as it comes.

        Layer N gives the `hidden_states[N]` of transformers. The states are written again once
        `on_states` has returned.
        """
        decoder = self._decoder
        states = (decoder.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds)[0]
        places = position_ids if position_ids.ndim == 2 else position_ids[-3:]
        cos, sin = (x[0] for x in decoder.rotary_emb(states, places))
        deepest = max(layers)
        for number, layer in enumerate(self._layers):
            if number in layers:
                on_states(number, states.unsqueeze(0))
            if number == deepest:
                return
            answers = tree.answers if number + 1 == deepest else None
            states = layer(states, cos, sin, tree, answers)
            if number < len(deepstack_visual_embeds):
                assert visual_pos_masks is not None, "rows of images without their places"
                states[visual_pos_masks[0]] += deepstack_visual_embeds[number].to(states.dtype)
        norm = decoder.norm
        states = self.operations.normalise(states, norm.weight, norm.variance_epsilon)
        on_states(len(self._layers), states.unsqueeze(0))


class _LlamaLayer:
    def __init__(self, layer: Any, operations: Operations) -> None:
        self._operations, attention, mlp = operations, layer.self_attn, layer.mlp
        self._number: int = attention.layer_idx
        self._scale: float = attention.scaling
        self._attention = attention
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._q_norm, self._k_norm = (getattr(attention, n, None) for n in ("q_norm", "k_norm"))
        self._qkv = _products(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = _products(attention.o_proj)
        self._gate_and_up = _products(mlp.gate_proj, mlp.up_proj)
        self._down = _products(mlp.down_proj)
        on_cpu = layer.input_layernorm.weight.device.type == "cpu"
        self._block_rows = BLOCK_ROWS if on_cpu else GPU_BLOCK_ROWS
        self._inner_rows = self._block_rows
        if on_cpu and isinstance(self._down, RoundedProducts):
            self._inner_rows = INT8_ROWS
        elif on_cpu and layer.input_layernorm.weight.dtype == torch.bfloat16:
            self._inner_rows = BFLOAT16_ROWS

    @property
    def _window(self) -> int | None:
        """Qwen2 has the window on the layers that have one, Mistral in the configuration."""
        stated = getattr(self._attention.config, "sliding_window", None)
        window: int | None = getattr(self._attention, "sliding_window", stated)
        return window

    def __call__(
        self,
        states: Tensor,  # [rows, hidden]
        cos: Tensor,  # [rows, dim]
        sin: Tensor,  # [rows, dim]
        tree: TreeAttention,
        answers: Tensor | None,  # [answers] int64: the only rows that are computed
    ) -> Tensor:  # [rows, hidden], or [answers, hidden]
        first = 0 if answers is None else tree.tree.document_rows  # of the queries
        q, k, v = self._heads(states, cos, sin)
        attended = tree.attend(
            self._number,
            q[first:],
            LayerKV(k, v),
            scale=self._scale,
            window=self._window,
            softcap=None,
            branches_only=answers is not None,
        ).out.flatten(-2)
        del q, k, v  # — the feed-forward takes their memory
        if answers is not None:
            states, attended = states[answers], attended[answers - first]
        if len(states) <= self._inner_rows:
            return self._feed_forward(states, attended)
        for start in range(0, len(states), self._inner_rows):
            block = slice(start, start + self._inner_rows)
            states[block] = self._feed_forward(states[block], attended[block])
        return states

    def _heads(self, states: Tensor, cos: Tensor, sin: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values: [rows, heads, dim] each."""
        if len(states) <= self._block_rows:
            return self._heads_of_block(states, cos, sin)
        rows, (_, dim) = len(states), cos.shape
        heads = [states.new_empty(rows, each.out_features // dim, dim) for each in self._qkv.layers]
        for start in range(0, rows, self._block_rows):
            block = slice(start, start + self._block_rows)
            inputs = states[block], cos[block], sin[block]
            for whole, part in zip(heads, self._heads_of_block(*inputs), strict=True):
                whole[block] = part
        return heads

    def _heads_of_block(self, states: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        norm = self._norms[0]
        normed = self._operations.normalise(states, norm.weight, norm.variance_epsilon)
        heads = [x.view(len(x), -1, cos.shape[-1]) for x in self._qkv(normed)]
        for own, of_head in zip(heads, (self._q_norm, self._k_norm), strict=False):
            weight, epsilon = (of_head.weight, of_head.variance_epsilon) if of_head else (None, 0.0)
            self._operations.rotate(own, cos, sin, weight, epsilon)
        return heads

    def _feed_forward(
        self,
        states: Tensor,  # [rows, hidden]
        attended: Tensor,  # [rows, heads * dim]
    ) -> Tensor:  # [rows, hidden]
        states = self._out.added_to(states, attended)
        norm = self._norms[1]
        normed = self._operations.normalise(states, norm.weight, norm.variance_epsilon)
        products = self._gate_and_up
        if isinstance(products, FusedProducts):
            return self._down.added_to(states, products.gated(normed))
        return self._down.added_to(states, self._operations.gate(*products(normed)))


def _products(*layers: Any) -> Products:
    rounded = isinstance(layers[0], RoundedLinear)
    return (RoundedProducts if rounded else Products.of)(*layers)


def has_llama_form(network: Any) -> bool:
    """Whether the decoder of a model is of one of the families of this form."""
    config = network.config.get_text_config()
    return config.model_type in LLAMA_FORM and config.hidden_act in ("silu", "swish")
