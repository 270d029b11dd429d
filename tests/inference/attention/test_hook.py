"""What transformers hands to the hook attends by the tree, without a copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_oracle import DIM, SCALE, some, some_kv
from random_trees import Node, tree_of
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.inference.attention import hook as layers
from pipeline.inference.attention.hook import PrefixKV, TreeAttention
from pipeline.inference.attention.reference import Attended, LayerKV, attend_plainly


def from_transformers(tokens: int, tree: TreeAttention, **more: Any) -> tuple[Tensor, LayerKV]:
    """One layer's attention, called as transformers calls it, and the model's own tensors."""
    q, key, value = (
        some(i, tokens, heads).transpose(0, 1).contiguous()[None]  # [1, heads, tokens, dim]
        for i, heads in ((0, 6), (1, 2), (2, 2))
    )
    module = SimpleNamespace(layer_idx=1)
    mask = more.pop("attention_mask", None)
    out, _ = layers._interface(module, q, key, value, mask, SCALE, tree=tree, **more)  # type: ignore[arg-type]
    return out, LayerKV(k=key, v=value)


@pytest.mark.parametrize("window", [None, 5])
def test_the_kernel_reads_the_models_own_keys_and_the_kept_prefix_without_a_copy(
    window: int | None,
) -> None:
    tree = tree_of([40], [Node(4, (Node(2), Node(3))), Node(6)], prefix_tokens=9)
    prefix = PrefixKV({0: some_kv(5, 9, 2), 1: some_kv(7, 9, 2)}, tokens=9)
    reached: list[LayerKV] = []

    def kernel(q: Tensor, own: LayerKV, kept: LayerKV, *rest: Any) -> Attended:
        reached.extend((own, kept))
        return attend_plainly(q, own, kept, *rest)

    attention = TreeAttention(tree, kernel, prefix)
    out, own = from_transformers(tree.tokens, attention, sliding_window=window)
    assert out.shape == (1, tree.tokens, 6, DIM)
    for read, source in zip(reached, (own, prefix.layers[1]), strict=True):
        assert read.k.data_ptr() == source.k.data_ptr()
        assert read.v.data_ptr() == source.v.data_ptr()


def test_a_layer_with_a_mask_of_its_own_is_refused() -> None:
    tree = TreeAttention(tree_of([2], prefix_tokens=0), attend_plainly)
    with pytest.raises(ModelError, match="builds its own attention mask"):
        from_transformers(2, tree, attention_mask=torch.zeros(1, 1, 2, 2))
