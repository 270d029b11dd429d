"""Merged attention over spans equals its definition, for two spans and for a whole tree."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from dense_oracle import (
    COPIES,
    CPU_KERNELS,
    DIM,
    GROUPS,
    SCALE,
    assert_same,
    attend_run_by_run,
    cpu_kernel,
    dense,
    everything,
    joined,
    merge,
    pointer,
    prefix_of,
    seen_rows,
    some,
    some_kv,
)
from hypothesis import given
from hypothesis import strategies as st
from random_trees import DefinedTree, Node, defined_trees, tree_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.inference.attention.compiled import compile_plan
from pipeline.inference.attention.kernels import Attended, LayerKV, attend
from pipeline.inference.attention.merge import attend_tree, merge_into, view_rows
from pipeline.inference.attention.plan import Range, plan_attention, plan_ends


def parts(q: Tensor, kv: LayerKV, *stops: int) -> list[Attended]:
    """Attention over each span of the keys."""
    edges = [0, *stops, kv.k.shape[1]]
    return [
        attend(q, kv.k[:, start:stop], kv.v[:, start:stop], scale=SCALE)
        for start, stop in pairwise(edges)
    ]


@CPU_KERNELS
@given(COPIES, GROUPS, st.integers(1, 30))
def test_merging_two_spans_equals_attending_to_both(
    kernel: str, copies: int, group: tuple[int, int], split: int
) -> None:
    heads, kv_heads = group
    q, kv = some(0, copies, 9, heads), some_kv(1, copies, 31, kv_heads)
    with cpu_kernel(kernel):
        a, b = parts(q, kv, split)
        merged = merge(a, b)
        merge_into(a, b)
    assert_same(merged, dense(q, kv, everything(9, 31)))
    assert_same(a, merged)


@given(COPIES, GROUPS, st.sets(st.integers(1, 30), min_size=2, max_size=2))
def test_merging_is_associative_and_takes_any_order(
    copies: int, group: tuple[int, int], stops: set[int]
) -> None:
    heads, kv_heads = group
    q, kv = some(0, copies, 9, heads), some_kv(1, copies, 31, kv_heads)
    a, b, c = parts(q, kv, *sorted(stops))
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert_same(merge(a, b), merge(b, a))
    assert_same(merge(c, merge(a, b)), dense(q, kv, everything(9, 31)))


def test_merging_with_a_span_that_nobody_sees_changes_nothing() -> None:
    q, kv = some(0, 1, 4, 6), some_kv(1, 1, 10, 2)
    blind = attend(q, kv.k, kv.v, scale=SCALE, masked=everything(4, 10))
    seeing = attend(q, kv.k, kv.v, scale=SCALE)
    assert_same(merge(blind, seeing), seeing, atol=0)
    assert_same(merge(seeing, blind), seeing, atol=0)
    assert_same(merge(merge(blind, blind), seeing), seeing, atol=0)


@pytest.mark.parametrize("compiled, softcap", [(True, None), (False, None), (False, 2.0)])
@given(defined_trees())
def test_attending_over_a_tree_equals_dense_attention_under_its_mask(
    compiled: bool, softcap: float | None, defined: DefinedTree
) -> None:
    tree = defined.tree
    q, own, prefix = some(0, tree.tokens, 6), some_kv(1, tree.tokens, 2), prefix_of(tree)
    plan: Any = plan_attention(tree, window=defined.window)
    if compiled:
        plan = compile_plan(plan, torch.device("cpu"), attend_run_by_run)
    attended = attend_tree(q, own, prefix, plan, scale=SCALE, softcap=softcap)
    assert_same(attended, dense(q[None], joined(prefix, own), seen_rows(defined), softcap))


@pytest.mark.parametrize("compiled", [False, True])
@given(defined_trees(min_branches=1), st.integers(1, 2))
def test_attending_at_some_ends_equals_dense_attention_there(
    compiled: bool, defined: DefinedTree, step: int
) -> None:
    tree, ends = defined.tree, defined.ends[::step]
    rows = tree.rows_at(ends)
    assert rows.tolist() == [start + end for start in tree.branch_starts for end in ends]
    q, own, prefix = some(0, tree.tokens, 6)[rows], some_kv(1, tree.tokens, 2), prefix_of(tree)
    plan: Any = plan_ends(tree, ends, window=defined.window)
    if compiled:
        plan = compile_plan(plan, torch.device("cpu"), attend_run_by_run)
    attended = attend_tree(q, own, prefix, plan, scale=SCALE)
    assert_same(attended, dense(q[None], joined(prefix, own), seen_rows(defined)[rows]))


@given(defined_trees())
def test_half_precision_is_merged_with_a_float32_denominator(defined: DefinedTree) -> None:
    tree = defined.tree
    q = some(0, tree.tokens, 6).bfloat16()
    own, prefix = some_kv(1, tree.tokens, 2), prefix_of(tree)
    own, prefix = (LayerKV(k=kv.k.bfloat16(), v=kv.v.bfloat16()) for kv in (own, prefix))
    attended = attend_tree(q, own, prefix, plan_attention(tree, window=defined.window), scale=SCALE)
    expected = dense(q[None], joined(prefix, own), seen_rows(defined))
    # Values below 8 are rounded to bfloat16 after the weights and after each of five merges.
    atol = 6 * 8 * torch.finfo(torch.bfloat16).eps / 2
    assert attended.out.dtype == torch.bfloat16
    torch.testing.assert_close(attended.out.double(), expected.out, rtol=0, atol=atol)
    torch.testing.assert_close(attended.lse.double(), expected.lse, rtol=0, atol=1e-2)


def test_rows_and_their_copies_are_views() -> None:
    x = torch.arange(23)
    rows = view_rows(x, Range(3, 2, copies=4, stride=5))
    assert rows.tolist() == [[3, 4], [8, 9], [13, 14], [18, 19]]
    assert pointer(rows) == pointer(view_rows(x, Range(3, 2))) == pointer(x)


@pytest.mark.parametrize("window", [None, 5])
def test_the_kernel_reads_a_documents_keys_and_values_without_copying(
    window: int | None, read_by_kernel: list[tuple[Tensor, Tensor]]
) -> None:
    tree = tree_of([40], [Node(4, (Node(2), Node(3))), Node(6)], prefix_tokens=9)
    q, own = some(0, tree.tokens, 6), some_kv(1, tree.tokens, 2)
    prefix = some_kv(3, 9, 2)
    attend_tree(q, own, prefix, plan_attention(tree, window=window), scale=SCALE)
    assert {pointer(k) for k, _ in read_by_kernel} == {pointer(own.k), pointer(prefix.k)}
    assert {pointer(v) for _, v in read_by_kernel} == {pointer(own.v), pointer(prefix.v)}
    for tensor in [tensor for pair in read_by_kernel for tensor in pair]:
        kv_heads, group, _, dim = tensor.shape
        assert (kv_heads, group, dim) == (2, 3, DIM)
        assert tensor.stride(1) == 0


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
    tree = tree_of([document_tokens], [Node(QUESTION_TOKENS)] * questions, prefix_tokens=16)
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
