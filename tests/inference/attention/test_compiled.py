"""A compiled plan has few kernel calls, views all keys, and never waits for the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from dense_oracle import (
    SCALE,
    attend_run_by_run,
    dense,
    joined,
    pointer,
    seen_rows,
    some,
    some_kv,
)
from hypothesis import given
from random_trees import DefinedTree, Node, defined_trees, tree_of
from torch import Tensor

from pipeline.inference.attention.compiled import compile_plan
from pipeline.inference.attention.kernels import (
    Attended,
    Kernel,
    KernelCall,
    LayerKV,
    VarlenBatch,
    flash_kernel,
)
from pipeline.inference.attention.merge import Step, attend_tree
from pipeline.inference.attention.plan import AttentionPlan, Segment, plan_attention

CPU = torch.device("cpu")


def compiled(
    plan: AttentionPlan, device: torch.device = CPU, kernel: Kernel = attend_run_by_run
) -> list[Step]:
    return [step for level in compile_plan(plan, device, kernel) for step in level]


SHARED = [Node(4, (Node(2), Node(3))), Node(6), Node(5, (Node(1), Node(1)))]


@pytest.mark.parametrize("documents", [1, 5, 40])
def test_the_kernel_calls_of_a_layer_do_not_grow_with_the_batch(documents: int) -> None:
    plan = plan_attention(tree_of([7] * documents, SHARED, prefix_tokens=9), window=None)
    rows = [step.rows for step in compiled(plan) if isinstance(step, KernelCall)]
    # All rows themselves, the prefix, the documents, and two prefixes that questions share. The
    # rows below those are gathered where they are of several documents.
    viewed = [isinstance(of_step, slice) for of_step in rows]
    assert viewed == [True, True, True, documents == 1, documents == 1]
    assert len(rows) == len(compiled(plan))


def test_only_segments_that_hide_keys_from_some_queries_stay_segments() -> None:
    plan = plan_attention(tree_of([30, 3], SHARED, prefix_tokens=9), window=12)
    hiding = {c for level in plan for c in level if c.window and not c.causal}
    stayed = [step for step in compiled(plan) if isinstance(step, Segment)]
    assert set(stayed) == hiding and len(stayed) == len(hiding) > 0


@pytest.mark.parametrize("window", [None, 5, 20])
@pytest.mark.parametrize("branches_only", [False, True])
def test_the_kernel_reads_all_keys_and_values_without_copying(
    window: int | None, branches_only: bool
) -> None:
    tree = tree_of([40, 3, 18], SHARED, prefix_tokens=9)
    plan = plan_attention(tree, window=window, branches_only=branches_only)
    q, own, prefix = some(0, tree.tokens, 6), some_kv(1, tree.tokens, 2), some_kv(3, 9, 2)
    reached: list[tuple[int, int]] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, runs: VarlenBatch, scale: float) -> Attended:
        reached.append((pointer(k), pointer(v)))
        return attend_run_by_run(q, k, v, runs, scale=scale)

    queries = q[tree.document_rows if branches_only else 0 :]
    attend_tree(queries, own, prefix, compile_plan(plan, CPU, watched), scale=SCALE)
    assert len(reached) >= 2
    assert set(reached) <= {(pointer(kv.k), pointer(kv.v)) for kv in (own, prefix)}


def on(device: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """CUDA itself raises where the host would wait for it."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("branches_only", [False, True])
@pytest.mark.parametrize(
    "device, in_calls", [("cpu", False), ("cpu", True), pytest.param("cuda", True, marks=ON_CUDA)]
)
@given(defined_trees(prefix_tokens=9, min_branches=1))
def test_half_precision_equals_the_definition_and_waits_for_nothing(
    device: str, branches_only: bool, in_calls: bool, defined: DefinedTree
) -> None:
    tree = defined.tree
    rows = torch.arange(tree.document_rows if branches_only else 0, tree.tokens)
    shapes = [(tree.tokens, 6), *[(tree.tokens, 2)] * 2, *[(9, 2)] * 2]
    rounded = [some(i, *shape).bfloat16() for i, shape in enumerate(shapes)]
    q, k, v, prefix_k, prefix_v = on(device, rounded)
    kernel = flash_kernel() if device == "cuda" else attend_run_by_run
    plan: Any = plan_attention(tree, window=defined.window, branches_only=branches_only)
    if in_calls:
        plan = compile_plan(plan, torch.device(device), kernel)
    queries, own, prefix = q[rows.to(device)], LayerKV(k, v), LayerKV(prefix_k, prefix_v)
    with no_waiting(device):
        actual = attend_tree(queries, own, prefix, plan, scale=SCALE)
    kv = joined(LayerKV(*rounded[3:]), LayerKV(*rounded[1:3]))
    expected = dense(rounded[0][rows][None], kv, seen_rows(defined)[rows])
    # Values below 8 are rounded to bfloat16 after the weights and after each step and merge.
    atol = 2 * (sum(map(len, plan)) + 1) * 8 * torch.finfo(torch.bfloat16).eps / 2
    torch.testing.assert_close(actual.out.cpu().double(), expected.out, rtol=0, atol=atol)
    torch.testing.assert_close(actual.lse.cpu().double(), expected.lse, rtol=0, atol=1e-4)
