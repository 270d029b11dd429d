"""A layer over a tree equals dense attention under its mask, and reads keys where they lie."""

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
    joined,
    seen_rows,
    some,
    some_kv,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.errors import ModelError
from pipeline.inference.attention import hook as layers
from pipeline.inference.attention import kernels as attention
from pipeline.inference.attention.compiled import compile_plans
from pipeline.inference.attention.hook import (
    PrefixKV,
    StopForward,
    TreeAttention,
    apply_attention_sinks,
)
from pipeline.inference.attention.kernels import Attended, LayerKV, attend_tree, view_rows
from pipeline.inference.attention.plan import Rows, plan_attention, plan_ends
from pipeline.inference.attention.tree import Node, Tree
from pipeline.inference.attention.varlen import Runs

Grow = Callable[..., Any]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("prefix_tokens", [0, 9])
@pytest.mark.parametrize("window", [None, 3, 16])
def test_attending_over_a_tree_equals_dense_attention_under_its_mask(
    seed: int, prefix_tokens: int, window: int | None, grow: Grow
) -> None:
    grown = grow(seed, prefix_tokens=prefix_tokens)
    q, own = some(seed, grown.tree.tokens, 6), some_kv(seed + 1, grown.tree.tokens, 2)
    prefix = some_kv(seed + 3, prefix_tokens, 2)
    plan = plan_attention(grown.tree, window=window)
    attended = attend_tree(q, own, prefix if prefix_tokens else None, plan, scale=SCALE)
    assert_same(attended, dense(q[None], joined(prefix, own), seen_rows(grown, window)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("prefix_tokens", [0, 9])
@pytest.mark.parametrize("window", [None, 3, 16])
def test_attending_at_the_ends_equals_attending_everywhere(
    seed: int, prefix_tokens: int, window: int | None, grow: Grow
) -> None:
    grown = grow(seed, prefix_tokens=prefix_tokens)
    tree = grown.tree
    ends = [span.stop - 1 for span in tree.spans]
    if not ends:
        return
    rows = [start + end for start in tree.branch_starts for end in ends]
    q, own = some(seed, tree.tokens, 6), some_kv(seed + 1, tree.tokens, 2)
    prefix = some_kv(seed + 3, prefix_tokens, 2)
    plan = plan_ends(tree, ends, window=window)
    attended = attend_tree(q[rows], own, prefix if prefix_tokens else None, plan, scale=SCALE)
    seen = seen_rows(grown, window)[rows]
    assert_same(attended, dense(q[rows][None], joined(prefix, own), seen))


@pytest.mark.parametrize("softcap", [2.0, 30.0])
def test_capped_scores_are_merged_like_any(softcap: float, grow: Grow) -> None:
    grown = grow(3, prefix_tokens=9)
    q, own = some(0, grown.tree.tokens, 6), some_kv(1, grown.tree.tokens, 2)
    prefix, plan = some_kv(3, 9, 2), plan_attention(grown.tree, window=5)
    attended = attend_tree(q, own, prefix, plan, scale=SCALE, softcap=softcap)
    expected = dense(q[None], joined(prefix, own), seen_rows(grown, 5), softcap)
    assert_same(attended, expected)


def test_a_sink_takes_its_share_of_every_softmax() -> None:
    q, kv = some(0, 1, 9, 6), some_kv(1, 1, 31, 2)
    sinks = torch.linspace(-2, 3, 6)
    whole = dense(q, kv, torch.ones(9, 31, dtype=torch.bool))
    with_sinks = apply_attention_sinks(Attended(whole.out.float(), whole.lse.float()), sinks)
    share = 1 / (1 + (sinks.double() - whole.lse).exp())
    expected = Attended(whole.out * share[..., None], torch.logaddexp(whole.lse, sinks.double()))
    assert_same(with_sinks, expected)


def test_rows_and_their_copies_are_views() -> None:
    x = torch.arange(23)
    rows = view_rows(x, Rows(3, 2, copies=4, stride=5))
    assert rows.tolist() == [[3, 4], [8, 9], [13, 14], [18, 19]]
    assert pointer(rows) == pointer(view_rows(x, Rows(3, 2))) == pointer(x)


def test_half_precision_is_merged_with_a_float32_denominator(grow: Grow) -> None:
    grown = grow(3, prefix_tokens=9)
    q = some(0, grown.tree.tokens, 6).bfloat16()
    own, prefix = some_kv(1, grown.tree.tokens, 2), some_kv(3, 9, 2)
    own, prefix = (LayerKV(k=kv.k.bfloat16(), v=kv.v.bfloat16()) for kv in (own, prefix))
    attended = attend_tree(q, own, prefix, plan_attention(grown.tree, window=None), scale=SCALE)
    expected = dense(q[None], joined(prefix, own), seen_rows(grown, None))
    # Values below 8 are rounded to bfloat16 after the weights and after each of five merges.
    atol = 6 * 8 * torch.finfo(torch.bfloat16).eps / 2
    assert attended.out.dtype == torch.bfloat16
    torch.testing.assert_close(attended.out.double(), expected.out, rtol=0, atol=atol)
    torch.testing.assert_close(attended.lse.double(), expected.lse, rtol=0, atol=1e-2)


def pointer(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def read_by_kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """The keys and values that reach the kernel, as they reach it."""
    reached: list[tuple[Tensor, Tensor]] = []
    real = attention._flash_cpu

    def watched(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        reached.append((k, v))
        return real(q, k, v, *rest)

    monkeypatch.setattr(attention, "_flash_cpu", watched)
    return reached


@pytest.mark.parametrize("window", [None, 5])
def test_the_kernel_reads_a_documents_keys_and_values_where_they_lie(
    window: int | None, read_by_kernel: list[tuple[Tensor, Tensor]]
) -> None:
    tree = Tree.of([40], [Node(4, (Node(2), Node(3))), Node(6)], prefix_tokens=9)
    q, own = some(0, tree.tokens, 6), some_kv(1, tree.tokens, 2)
    prefix = some_kv(3, 9, 2)
    attend_tree(q, own, prefix, plan_attention(tree, window=window), scale=SCALE)
    assert {pointer(k) for k, _ in read_by_kernel} == {pointer(own.k), pointer(prefix.k)}
    assert {pointer(v) for _, v in read_by_kernel} == {pointer(own.v), pointer(prefix.v)}
    for tensor in [tensor for pair in read_by_kernel for tensor in pair]:
        kv_heads, group, _, dim = tensor.shape
        assert (kv_heads, group, dim) == (2, 3, DIM)
        assert tensor.stride(1) == 0


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
    tree = Tree.of([10], [Node(3), Node(2)], prefix_tokens=4)
    prefix = PrefixKV({0: some_kv(5, 4, 2), 1: some_kv(7, 4, 2)}, tokens=4)
    plans = {None: plan_attention(tree, window=None)}
    out, own = from_transformers(15, TreeAttention(plans, prefix))
    assert out.shape == (1, 15, 6, DIM)
    kept = prefix.layers[1]
    assert {pointer(k) for k, _ in read_by_kernel} == {pointer(own.k), pointer(kept.k)}
    assert {pointer(v) for _, v in read_by_kernel} == {pointer(own.v), pointer(kept.v)}


def test_a_kept_layer_holds_the_keys_of_its_own_tokens_only() -> None:
    tree = Tree.of([10], prefix_tokens=0)
    keep: dict[int, LayerKV] = {}
    _, own = from_transformers(
        10, TreeAttention({None: plan_attention(tree, window=None)}, keep=keep)
    )
    assert list(keep) == [1]
    assert torch.equal(keep[1].k, own.k[0].transpose(0, 1))
    assert PrefixKV(keep, tokens=10).size_bytes == 2 * 10 * 2 * DIM * 4


def test_a_layer_that_is_only_kept_is_left_at_once() -> None:
    keep: dict[int, LayerKV] = {}
    with pytest.raises(StopForward):
        from_transformers(10, TreeAttention({}, keep=keep, only_keep=True))
    assert keep[1].k.shape == (10, 2, DIM)


def test_given_keys_are_read_in_place_of_the_batchs_own() -> None:
    tree = Tree.of([10], [Node(3)], prefix_tokens=0)
    given = PrefixKV({1: some_kv(7, 13, 2)}, tokens=13)
    plans = {None: plan_ends(tree, [2], window=None)}
    out, _ = from_transformers(1, TreeAttention(plans, given=given))
    kv = LayerKV(k=given.layers[1].k[None], v=given.layers[1].v[None])
    expected = dense(some(0, 1, 6)[None], kv, torch.ones(1, 13, dtype=torch.bool))
    torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=TOLERANCE)


def all_ones(q: Tensor, k: Tensor, v: Tensor, runs: Runs, *, scale: float) -> Attended:
    return Attended(torch.ones_like(q)[None], torch.zeros(1, *q.shape[:2]))


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_compiled_plan_is_used_where_it_can_be_and_scores_are_not_capped(
    softcap: float | None,
) -> None:
    plans = {5: plan_attention(Tree.of([3], prefix_tokens=0), window=5)}
    compiled = compile_plans(plans, torch.device("cpu"), all_ones)
    tree = TreeAttention(plans, compiled=compiled)
    out, _ = from_transformers(3, tree, sliding_window=5, softcap=softcap)
    assert out.eq(1).all() == (softcap is None)


def test_a_layer_with_a_mask_of_its_own_is_refused() -> None:
    plans = {None: plan_attention(Tree.of([2], prefix_tokens=0), window=None)}
    with pytest.raises(ModelError, match="a mask of its own is not modelled"):
        from_transformers(2, TreeAttention(plans), attention_mask=torch.zeros(1, 1, 2, 2))


class Allocated(TorchDispatchMode):
    """Counts the bytes of every new storage: at least what stands in memory at any one time."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {pointer(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        made = {
            pointer(x): x.untyped_storage().nbytes()
            for x in tree_leaves(result)
            if isinstance(x, Tensor) and pointer(x) not in known
        }
        self.size_bytes += sum(made.values())
        return result


QUESTION_TOKENS, HEAD_COUNT, KV_HEADS = 4, 6, 2


def allocated(document_tokens: int, questions: int) -> int:
    tree = Tree.of([document_tokens], [Node(QUESTION_TOKENS)] * questions, prefix_tokens=16)
    q, own = some(0, tree.tokens, HEAD_COUNT), some_kv(1, tree.tokens, KV_HEADS)
    prefix = some_kv(3, 16, KV_HEADS)
    plan = plan_attention(tree, window=None)
    with Allocated() as counted:
        attend_tree(q, own, prefix, plan, scale=SCALE)
    return counted.size_bytes


def test_more_questions_allocate_for_their_own_tokens_and_never_for_the_document() -> None:
    document_tokens, few, many = 4_000, 2, 32
    added = (many - few) * QUESTION_TOKENS
    # Three results a token (itself, its document, the prefix), each at most twice as it is
    # reshaped and joined, and for each merge a handful of numbers a head.
    own_bytes = added * HEAD_COUNT * (3 * 2 * DIM + 3 * 8) * 4
    document_kv_bytes = document_tokens * KV_HEADS * DIM * 2 * 4
    assert own_bytes < document_kv_bytes  # so that even one more copy of it would show
    grown = allocated(document_tokens, many) - allocated(document_tokens, few)
    assert 0 < grown <= own_bytes


def test_a_longer_document_costs_the_same_more_under_two_questions_as_under_thirty_two() -> None:
    few = allocated(4_000, 2) - allocated(1_000, 2)
    many = allocated(4_000, 32) - allocated(1_000, 32)
    assert few == many > 0
