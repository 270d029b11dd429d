"""What transformers hands to the hook attends by the tree, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_oracle import (
    DIM,
    SCALE,
    TOLERANCE,
    assert_same,
    dense,
    pointer,
    some,
    some_kv,
)
from random_trees import Node, tree_of
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.inference.attention import hook as layers
from pipeline.inference.attention.compiled import compile_plan
from pipeline.inference.attention.hook import (
    PrefixKV,
    StopForward,
    TreeAttention,
    apply_attention_sinks,
)
from pipeline.inference.attention.kernels import Attended, LayerKV, VarlenBatch
from pipeline.inference.attention.plan import plan_attention, plan_ends

Grow = Callable[..., Any]


def test_a_sink_takes_its_share_of_every_softmax() -> None:
    q, kv = some(0, 1, 9, 6), some_kv(1, 1, 31, 2)
    sinks = torch.linspace(-2, 3, 6)
    whole = dense(q, kv, torch.ones(9, 31, dtype=torch.bool))
    with_sinks = apply_attention_sinks(Attended(whole.out.float(), whole.lse.float()), sinks)
    share = 1 / (1 + (sinks.double() - whole.lse).exp())
    expected = Attended(whole.out * share[..., None], torch.logaddexp(whole.lse, sinks.double()))
    assert_same(with_sinks, expected)


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


def test_the_layer_reads_the_models_own_keys_and_the_kept_prefix_without_a_copy(
    read_by_kernel: list[tuple[Tensor, Tensor]],
) -> None:
    tree = tree_of([10], [Node(3), Node(2)], prefix_tokens=4)
    prefix = PrefixKV({0: some_kv(5, 4, 2), 1: some_kv(7, 4, 2)}, tokens=4)
    plans = {None: plan_attention(tree, window=None)}
    out, own = from_transformers(15, TreeAttention(plans, prefix))
    assert out.shape == (1, 15, 6, DIM)
    kept = prefix.layers[1]
    assert {pointer(k) for k, _ in read_by_kernel} == {pointer(own.k), pointer(kept.k)}
    assert {pointer(v) for _, v in read_by_kernel} == {pointer(own.v), pointer(kept.v)}


def test_a_kept_layer_holds_the_keys_of_its_own_tokens_only() -> None:
    tree = tree_of([10], prefix_tokens=0)
    keep: dict[int, LayerKV] = {}
    _, own = from_transformers(
        10, TreeAttention({None: plan_attention(tree, window=None)}, keep=keep)
    )
    assert list(keep) == [1]
    assert torch.equal(keep[1].k, own.k[0].transpose(0, 1))
    assert sum(kv.k.nbytes + kv.v.nbytes for kv in keep.values()) == 2 * 10 * 2 * DIM * 4


def test_a_layer_that_is_only_kept_is_left_at_once() -> None:
    keep: dict[int, LayerKV] = {}
    with pytest.raises(StopForward):
        from_transformers(10, TreeAttention({}, keep=keep, only_keep=True))
    assert keep[1].k.shape == (10, 2, DIM)


def test_computed_keys_are_read_in_place_of_the_batchs_own() -> None:
    tree = tree_of([10], [Node(3)], prefix_tokens=0)
    computed = some_kv(7, 13, 2)
    plans = {None: plan_ends(tree, [2], window=None)}
    out, _ = from_transformers(1, TreeAttention(plans, computed={1: computed}))
    kv = LayerKV(k=computed.k[None], v=computed.v[None])
    expected = dense(some(0, 1, 6)[None], kv, torch.ones(1, 13, dtype=torch.bool))
    torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=TOLERANCE)


def all_ones(q: Tensor, k: Tensor, v: Tensor, runs: VarlenBatch, scale: float) -> Attended:
    return Attended(torch.ones_like(q)[None], torch.zeros(1, *q.shape[:2]))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_compiled_plan_is_used_where_it_can_be_and_scores_are_not_capped(
    softcap: float | None,
) -> None:
    plan = plan_attention(tree_of([3], prefix_tokens=0), window=5)
    compiled = compile_plan(plan, torch.device("cpu"), all_ones)
    tree = TreeAttention({5: plan}, compiled={5: compiled})
    out, _ = from_transformers(3, tree, sliding_window=5, softcap=softcap)
    assert out.eq(1).all() == (softcap is None)


def test_a_layer_with_a_mask_of_its_own_is_refused() -> None:
    plans = {None: plan_attention(tree_of([2], prefix_tokens=0), window=None)}
    with pytest.raises(ModelError, match="builds its own attention mask"):
        from_transformers(2, TreeAttention(plans), attention_mask=torch.zeros(1, 1, 2, 2))
