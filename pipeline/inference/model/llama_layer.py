"""One decoder layer for the families of the Llama form: Llama, Mistral, Qwen2, Qwen3.

Entry points: `use_llama_layers`, `use_family_layers` and `set_feed_forward_rows`. The layer runs on
every device and in every number format. It reads the tree itself, so that the deepest layer of a
batch is computed at the rows of answers alone. It writes sums in place, and the processor's kernels
compute what is between the products, where there are any. All but the attention takes a block of
rows at a time, so that a long document needs the inner states of one block. Under the tree alone:
separate prompts, with which the tree is compared, keep the family's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from pipeline.inference.attention.hook import AnswerRows, TreeAttention
from pipeline.inference.attention.kernels import LayerKV
from pipeline.inference.memory import BLOCK_ROWS, GPU_BLOCK_ROWS, LLAMA_FORM
from pipeline.inference.model.passes import passes

# Rows of a block with 8-bit products, which stay in the cache from one product to the next. On a
# Xeon of model 167 a document of 1,000 tokens took .82 s with 256 rows, .78 with 384 and .85 with
# 512. In float32, on a Xeon of model 207, it took .99 with blocks and .96 without.
INT8_ROWS = 384


_SILU = (nn.SiLU, type(ACT2FN["silu"]))


class LlamaLayer:
    """The forward of a layer: h + attention(norm(h)), then h + feed_forward(norm(h)).

    Biases, norms of queries and keys, grouped heads and the window are those of the family's
    modules.
    """

    def __init__(self, layer: Any, *, block_rows: int) -> None:
        self.block_rows = self.feed_forward_rows = block_rows
        self._family: Callable[..., Tensor] = type(layer).forward.__get__(layer)
        self._layer, self._attention, self._mlp = layer, layer.self_attn, layer.mlp

    def __call__(
        self,
        hidden_states: Tensor,  # [1, rows, hidden]
        *,
        tree: TreeAttention | None = None,
        **others: Any,  # position_embeddings, and what only the family's own code reads
    ) -> Tensor:  # [1, rows, hidden], or [1, answers, hidden] where only these rows are computed
        if tree is None:
            return self._family(hidden_states, **others)
        answers = tree.answers_at(self._attention.layer_idx)
        cos, sin = others["position_embeddings"]
        attended = self._attend(hidden_states, cos, sin, tree, answers)
        if answers is not None:
            hidden_states = hidden_states[:, answers.rows]
            attended = attended[:, answers.rows - answers.first]
        states: Tensor = self._attention.o_proj(attended)
        add = passes(states.device.type, states.dtype).add
        add(states, hidden_states)
        rows = states.flatten(0, 1)
        for block in torch.split(rows, self.feed_forward_rows):
            add(block, self._feed_forward(block))
        return states

    def _attend(
        self,
        hidden_states: Tensor,  # [1, rows, hidden]
        cos: Tensor,  # [1, rows, dim]
        sin: Tensor,  # [1, rows, dim]
        tree: TreeAttention,
        answers: AnswerRows | None,
    ) -> Tensor:  # [1, queries, heads * dim]
        attention, first = self._attention, answers.first if answers else 0
        (_, rows, _), (_, _, dim) = hidden_states.shape, cos.shape
        q, k, v = (
            hidden_states.new_empty(1, rows, project.out_features // dim, dim)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        for start in range(0, rows, self.block_rows):
            block = slice(start, start + self.block_rows)
            x = _normalise(hidden_states[:, block], self._layer.input_layernorm)
            places = cos[:, block], sin[:, block]
            if block.stop > first:
                self._rotate_heads(x, attention.q_proj, "q_norm", *places, q[:, block])
            self._rotate_heads(x, attention.k_proj, "k_norm", *places, k[:, block])
            v[:, block] = attention.v_proj(x).unflatten(-1, (-1, dim))
        attended = tree.attend(
            attention.layer_idx,
            q[:, first:],
            LayerKV(k, v),
            scale=attention.scaling,
            window=_window(attention),
            softcap=None,
        )
        return attended.out.flatten(-2)

    def _rotate_heads(
        self,
        x: Tensor,  # [1, rows, hidden]
        project: Any,
        norm: str,  # its name, if the family has one
        cos: Tensor,  # [1, rows, dim]
        sin: Tensor,  # [1, rows, dim]
        out: Tensor,  # [1, rows, heads, dim]
    ) -> None:
        heads = project(x).unflatten(-1, (-1, cos.shape[-1]))
        of_heads = getattr(self._attention, norm, None)
        weight, epsilon = (of_heads.weight, of_heads.variance_epsilon) if of_heads else (None, 0.0)
        passes(x.device.type, x.dtype).rotate(heads, cos, sin, out, weight, epsilon)

    def _feed_forward(
        self,
        states: Tensor,  # [rows, hidden]
    ) -> Tensor:  # [rows, hidden]
        mlp, x = self._mlp, _normalise(states, self._layer.post_attention_layernorm)
        gates = mlp.gate_proj(x)
        if isinstance(mlp.act_fn, _SILU):
            gates = passes(x.device.type, x.dtype).gate(gates, mlp.up_proj(x))
        else:
            gates = mlp.act_fn(gates).mul_(mlp.up_proj(x))
        down: Tensor = mlp.down_proj(gates)
        return down


def _window(attention: Any) -> int | None:
    """Qwen2 has the window on the layers that have one, Mistral in the configuration."""
    stated = getattr(attention.config, "sliding_window", None)
    window: int | None = getattr(attention, "sliding_window", stated)
    return window


def _normalise(
    x: Tensor,  # [..., hidden]
    norm: Any,
) -> Tensor:  # [..., hidden]
    return passes(x.device.type, x.dtype).normalise(x, norm.weight, norm.variance_epsilon)


def use_llama_layers(decoder: Any) -> bool:
    """Gives a decoder of the Llama form this forward for its layers, in place; whether it has it.

    That it computes the family's states is for the caller to prove.
    """
    if decoder.config.model_type not in LLAMA_FORM:
        return False
    block_rows = BLOCK_ROWS if decoder.device.type == "cpu" else GPU_BLOCK_ROWS
    for layer in decoder.layers:
        layer.forward = LlamaLayer(layer, block_rows=block_rows)
    return True


def use_family_layers(decoder: Any) -> None:
    """Gives the layers their family's forward again."""
    for layer in decoder.layers:
        vars(layer).pop("forward", None)


def set_feed_forward_rows(decoder: Any, rows: int) -> None:
    """Lets the feed-forwards of these layers take `rows` rows at a time."""
    for layer in getattr(decoder, "layers", ()):
        if isinstance(forward := vars(layer).get("forward"), LlamaLayer):
            forward.feed_forward_rows = rows
