"""Attention over a tree equals dense attention under a mask, and reads keys where they lie."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.errors import ModelError
from pipeline.inference import attention
from pipeline.inference.attention import (
    Attended,
    LayerKV,
    PrefixKV,
    TreeAttention,
    attend,
    attend_tree,
    merge,
    merge_into,
)
from pipeline.inference.tree import Node, Tree, plan_attention

Grow = Callable[..., Any]

DIM = 8
SCALE = DIM**-0.5
# A score sums 8 products, below 64 in all, in float32: its error enters a weight as a factor, and
# a weighted mean of values below 8 as that much more. Half of it is seen at worst.
TOLERANCE = 64 * SCALE * 8 * torch.finfo(torch.float32).eps / 2

HEADS = [(6, 2), (4, 4), (8, 1)]
KERNELS = ["_flash_cpu", "_plain"]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test of the numbers runs with the CPU's fused kernel and with the plain definition."""
    monkeypatch.setattr(attention, "_flash_cpu", getattr(attention, request.param))
    return str(request.param)


def some(seed: int, tokens: int, heads: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(tokens, heads, DIM, generator=generator)


def some_kv(seed: int, keys: int, kv_heads: int) -> LayerKV:
    return LayerKV(k=some(seed, keys, kv_heads), v=some(seed + 1, keys, kv_heads))


def dense(
    q: Tensor,  # [tokens, heads, dim]
    kv: LayerKV,
    seen: Tensor,  # [tokens, keys] bool
) -> Attended:
    """The oracle: a softmax in float64 over the keys that each query sees, head by head."""
    _, heads, _ = q.shape
    _, kv_heads, _ = kv.k.shape
    group = heads // kv_heads
    outs, lses = [], []
    for head in range(heads):
        scores = q[:, head].double() @ kv.k[:, head // group].double().T * SCALE
        scores = scores.masked_fill(~seen, -torch.inf)  # [tokens, keys]
        weights = scores.softmax(dim=-1).nan_to_num(0.0)
        outs.append(weights @ kv.v[:, head // group].double())
        lses.append(scores.logsumexp(dim=-1))
    return Attended(out=torch.stack(outs, dim=1), lse=torch.stack(lses, dim=1))


def assert_same(actual: Attended, expected: Attended, atol: float = TOLERANCE) -> None:
    assert actual.lse.dtype == torch.float32
    torch.testing.assert_close(actual.out.double(), expected.out.double(), rtol=0, atol=atol)
    torch.testing.assert_close(actual.lse.double(), expected.lse.double(), rtol=0, atol=TOLERANCE)


def everything(tokens: int, keys: int) -> Tensor:
    return torch.ones(tokens, keys, dtype=torch.bool)


def some_mask(tokens: int, keys: int) -> Tensor:
    """Which keys are seen: about half, and the first and third query see none."""
    seen = torch.rand(tokens, keys, generator=torch.Generator().manual_seed(5)) < 0.5
    seen[0] = False
    seen[2:3] = False
    return seen


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("tokens, keys", [(1, 1), (1, 40), (7, 3), (33, 65)])
def test_attending_is_a_softmax_over_all_keys(
    heads: int, kv_heads: int, tokens: int, keys: int, kernel: str
) -> None:
    q, kv = some(0, tokens, heads), some_kv(1, keys, kv_heads)
    attended = attend(q, kv.k, kv.v, scale=SCALE)
    assert_same(attended, dense(q, kv, everything(tokens, keys)))


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("tokens", [1, 2, 31, 70])
def test_causal_attention_sees_no_later_key(
    heads: int, kv_heads: int, tokens: int, kernel: str
) -> None:
    q, kv = some(0, tokens, heads), some_kv(1, tokens, kv_heads)
    attended = attend(q, kv.k, kv.v, scale=SCALE, causal=True)
    assert_same(attended, dense(q, kv, everything(tokens, tokens).tril()))


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("tokens, keys", [(1, 5), (4, 9), (33, 65)])
def test_hidden_keys_are_not_seen_and_a_blind_query_has_nothing(
    heads: int, kv_heads: int, tokens: int, keys: int, kernel: str
) -> None:
    q, kv = some(0, tokens, heads), some_kv(1, keys, kv_heads)
    seen = some_mask(tokens, keys)
    attended = attend(q, kv.k, kv.v, scale=SCALE, hidden=~seen)
    assert_same(attended, dense(q, kv, seen))
    assert attended.out[0].eq(0).all()
    assert attended.lse[0].eq(-torch.inf).all()


def parts(q: Tensor, kv: LayerKV, *stops: int) -> list[Attended]:
    """Attention over each piece of the keys."""
    edges = [0, *stops, kv.k.shape[0]]
    return [
        attend(q, kv.k[start:stop], kv.v[start:stop], scale=SCALE)
        for start, stop in pairwise(edges)
    ]


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("split", [1, 7, 30])
def test_merging_two_spans_equals_attending_to_both(
    heads: int, kv_heads: int, split: int, kernel: str
) -> None:
    q, kv = some(0, 9, heads), some_kv(1, 31, kv_heads)
    assert_same(merge(*parts(q, kv, split)), dense(q, kv, everything(9, 31)))


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_merging_is_associative_and_takes_any_order(heads: int, kv_heads: int) -> None:
    q, kv = some(0, 9, heads), some_kv(1, 31, kv_heads)
    a, b, c = parts(q, kv, 4, 20)
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert_same(merge(a, b), merge(b, a))
    assert_same(merge(c, merge(a, b)), dense(q, kv, everything(9, 31)))


def blind_and_seeing() -> tuple[Attended, Attended]:
    q, kv = some(0, 4, 6), some_kv(1, 10, 2)
    blind = attend(q, kv.k, kv.v, scale=SCALE, hidden=everything(4, 10))
    return blind, attend(q, kv.k, kv.v, scale=SCALE)


def test_merging_with_a_span_that_nobody_sees_changes_nothing() -> None:
    blind, seeing = blind_and_seeing()
    assert_same(merge(blind, seeing), seeing, atol=0)
    assert_same(merge(seeing, blind), seeing, atol=0)


def test_merging_is_associative_where_two_spans_are_not_seen() -> None:
    blind, seeing = blind_and_seeing()
    assert_same(merge(merge(blind, blind), seeing), seeing, atol=0)


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("start, stop", [(0, 9), (0, 1), (3, 7), (8, 9)])
def test_merging_in_place_equals_merging_and_leaves_other_rows(
    heads: int, kv_heads: int, start: int, stop: int
) -> None:
    q, kv = some(0, 9, heads), some_kv(1, 31, kv_heads)
    whole, _ = parts(q, kv, 12)
    before = Attended(whole.out.clone(), whole.lse.clone())
    part = parts(q[start:stop], kv, 12)[1]
    merge_into(whole, start, stop, part)
    rows = slice(start, stop)
    expected = merge(Attended(before.out[rows], before.lse[rows]), part)
    assert_same(Attended(whole.out[rows], whole.lse[rows]), expected)
    others = [row for row in range(9) if not start <= row < stop]
    assert torch.equal(whole.out[others], before.out[others])
    assert torch.equal(whole.lse[others], before.lse[others])


def seen_rows(grown: Any, window: int | None) -> Tensor:  # [tokens, prefix + tokens] bool
    prefix = grown.tree.prefix_tokens
    seen = torch.zeros(grown.tree.tokens, prefix + grown.tree.tokens, dtype=torch.bool)
    for row in range(grown.tree.tokens):
        for source, number in grown.seen(row, window):
            seen[row, number + (prefix if source == "row" else 0)] = True
    return seen


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("prefix_tokens", [0, 9])
@pytest.mark.parametrize("window", [None, 3, 16])
def test_attending_over_a_tree_equals_dense_attention_under_its_mask(
    seed: int, prefix_tokens: int, window: int | None, grow: Grow, kernel: str
) -> None:
    grown = grow(seed, prefix_tokens=prefix_tokens)
    q, own = some(seed, grown.tree.tokens, 6), some_kv(seed + 1, grown.tree.tokens, 2)
    prefix = some_kv(seed + 3, prefix_tokens, 2)
    plan = plan_attention(grown.tree, window=window)
    attended = attend_tree(q, own, prefix if prefix_tokens else None, plan, scale=SCALE)
    both = LayerKV(k=torch.cat([prefix.k, own.k]), v=torch.cat([prefix.v, own.v]))
    assert_same(attended, dense(q, both, seen_rows(grown, window)))


def test_half_precision_is_merged_with_a_float32_denominator(grow: Grow) -> None:
    grown = grow(3, prefix_tokens=9)
    q = some(0, grown.tree.tokens, 6).bfloat16()
    own, prefix = some_kv(1, grown.tree.tokens, 2), some_kv(3, 9, 2)
    own, prefix = (LayerKV(k=kv.k.bfloat16(), v=kv.v.bfloat16()) for kv in (own, prefix))
    attended = attend_tree(q, own, prefix, plan_attention(grown.tree, window=None), scale=SCALE)
    both = LayerKV(k=torch.cat([prefix.k, own.k]), v=torch.cat([prefix.v, own.v]))
    expected = dense(q, both, seen_rows(grown, None))
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
def test_the_kernel_reads_keys_and_values_where_they_lie(
    window: int | None, grow: Grow, read_by_kernel: list[tuple[Tensor, Tensor]]
) -> None:
    grown = grow(1, prefix_tokens=9)
    q, own = some(0, grown.tree.tokens, 6), some_kv(1, grown.tree.tokens, 2)
    prefix = some_kv(3, 9, 2)
    attend_tree(q, own, prefix, plan_attention(grown.tree, window=window), scale=SCALE)
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
    out, _ = attention._interface(module, q, key, value, mask, SCALE, tree=tree, **more)  # type: ignore[arg-type]
    return out, LayerKV(k=key, v=value)


def test_the_layer_reads_the_models_own_keys_and_the_kept_prefix_without_a_copy(
    read_by_kernel: list[tuple[Tensor, Tensor]],
) -> None:
    tree = Tree.of([Node(10, (Node(3), Node(2)))], prefix_tokens=4)
    prefix = PrefixKV({0: some_kv(5, 4, 2), 1: some_kv(7, 4, 2)}, tokens=4)
    plans = {None: plan_attention(tree, window=None)}
    out, own = from_transformers(15, TreeAttention(plans, prefix))
    assert out.shape == (1, 15, 6, DIM)
    kept = prefix.layers[1]
    assert {pointer(k) for k, _ in read_by_kernel} == {pointer(own.k), pointer(kept.k)}
    assert {pointer(v) for _, v in read_by_kernel} == {pointer(own.v), pointer(kept.v)}


def test_a_kept_layer_holds_the_keys_of_its_own_tokens_only() -> None:
    tree = Tree.of([Node(10)], prefix_tokens=0)
    keep: dict[int, LayerKV] = {}
    _, own = from_transformers(
        10, TreeAttention({None: plan_attention(tree, window=None)}, keep=keep)
    )
    assert list(keep) == [1]
    assert torch.equal(keep[1].k, own.k[0].transpose(0, 1))
    assert PrefixKV(keep, tokens=10).size_bytes == 2 * 10 * 2 * DIM * 4


@pytest.mark.parametrize(
    "more, reason",
    [
        ({"softcap": 50.0}, "score soft-capping"),
        ({"s_aux": torch.zeros(6)}, "attention sinks"),
        ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "a mask of its own"),
    ],
)
def test_a_layer_that_does_more_than_attend_is_refused(more: dict[str, Any], reason: str) -> None:
    plans = {None: plan_attention(Tree.of([Node(2)], prefix_tokens=0), window=None)}
    with pytest.raises(ModelError, match=f"{reason} is not modelled"):
        from_transformers(2, TreeAttention(plans), **more)


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
    children = tuple(Node(QUESTION_TOKENS) for _ in range(questions))
    tree = Tree.of([Node(document_tokens, children)], prefix_tokens=16)
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
