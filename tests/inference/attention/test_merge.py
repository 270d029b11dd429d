"""Merged attention over spans equals its definition, for two spans and for a whole tree."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from allocations import allocated_at_most
from dense_oracle import (
    COPIES,
    CPU_KERNELS,
    DIM,
    GROUPS,
    SCALE,
    assert_same,
    cpu_kernel,
    dense,
    everything,
    joined,
    prefix_of,
    seen_rows,
    some,
    some_kv,
)
from hypothesis import assume, given
from hypothesis import strategies as st
from random_trees import DefinedTree, Node, defined_trees, tree_of

from pipeline.inference.attention.kernels import attend, merge_into
from pipeline.inference.attention.merge import attend_tree
from pipeline.inference.attention.plan import plan_attention


@CPU_KERNELS
@given(COPIES, GROUPS, st.sets(st.integers(1, 30), min_size=1, max_size=3), st.randoms())
def test_merging_spans_in_any_order_equals_attending_to_all(
    kernel: str, copies: int, group: tuple[int, int], stops: set[int], source: Random
) -> None:
    """Also with a span that no query sees: it changes nothing."""
    heads, kv_heads = group
    q, kv = some(0, copies, 9, heads), some_kv(1, copies, 31, kv_heads)
    with cpu_kernel(kernel):
        whole, *others = (
            attend(q, kv.k[:, start:stop], kv.v[:, start:stop], scale=SCALE)
            for start, stop in pairwise([0, *sorted(stops), 31])
        )
        others.append(attend(q, kv.k, kv.v, scale=SCALE, offset=99, window=1))
    source.shuffle(others)
    for part in others:
        merge_into(whole, part)
    assert_same(whole, dense(q, kv, everything(9, 31)))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("branches_only", [False, True])
@given(defined_trees())
def test_attending_over_a_tree_equals_dense_attention_under_its_mask(
    branches_only: bool, softcap: float | None, defined: DefinedTree
) -> None:
    tree = defined.tree
    rows = np.arange(tree.document_rows if branches_only else 0, tree.tokens)
    assume(len(rows))
    plan = plan_attention(tree, window=defined.window, branches_only=branches_only)
    q, own, prefix = some(0, tree.tokens, 6)[rows], some_kv(1, tree.tokens, 2), prefix_of(tree)
    attended = attend_tree(q, own, prefix, plan, scale=SCALE, softcap=softcap)
    expected = dense(q[None], joined(prefix, own), seen_rows(defined)[rows], softcap)
    assert_same(attended, expected)


QUESTION_TOKENS, HEAD_COUNT, KV_HEADS = 4, 6, 2


def allocated(document_tokens: int, questions: int) -> int:
    tree = tree_of([document_tokens], [Node(QUESTION_TOKENS)] * questions, prefix_tokens=16)
    q, own = some(0, tree.tokens, HEAD_COUNT), some_kv(1, tree.tokens, KV_HEADS)
    prefix = some_kv(3, 16, KV_HEADS)
    plan = plan_attention(tree, window=None)
    return allocated_at_most(lambda: attend_tree(q, own, prefix, plan, scale=SCALE))


def test_more_questions_allocate_for_their_own_tokens_and_never_for_the_document() -> None:
    document_tokens, few, many = 4_000, 2, 32
    added = (many - few) * QUESTION_TOKENS
    # Three results a token (itself, its document, the prefix), each at most twice as it is
    # reshaped and joined, and for each merge a handful of numbers a head.
    own_bytes = added * HEAD_COUNT * (3 * 2 * DIM + 3 * 8) * 4
    document_kv_bytes = document_tokens * KV_HEADS * DIM * 2 * 4
    assert own_bytes < document_kv_bytes  # so that even one more copy of it would show
    allocated(16, few)  # — the first call of a process chooses its kernel by trying them
    grown = allocated(document_tokens, many) - allocated(document_tokens, few)
    assert 0 < grown <= own_bytes
