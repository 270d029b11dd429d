"""Causal runs are few calls, equal dense attention, and never wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_oracle import (
    SCALE,
    assert_same,
    attend_run_by_run,
    dense,
    joined,
    prefix_of,
    seen_rows,
    some,
    some_kv,
)
from hypothesis import assume, given
from random_trees import DefinedTree, Node, defined_trees, tree_of
from torch import Tensor

from pipeline.inference.attention import causal_runs as module
from pipeline.inference.attention.causal_runs import CausalRuns, RunsCall, causal_runs
from pipeline.inference.attention.kernels import Attended, LayerKV, VarlenBatch, flash_kernel
from pipeline.inference.attention.merge import attend_tree
from pipeline.inference.attention.plan import plan_attention

CPU = torch.device("cpu")
SHARED = [Node(4, (Node(2), Node(3))), Node(6), Node(5, (Node(1), Node(1)))]


@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize("documents", [1, 5, 40])
def test_a_layer_is_one_call_of_the_kernel(documents: int, window: int | None) -> None:
    calls: list[int] = []

    def counted(q: Tensor, k: Tensor, v: Tensor, runs: VarlenBatch, scale: float) -> Attended:
        calls.append(len(q))
        return attend_run_by_run(q, k, v, runs, scale)

    tree = tree_of([7] * documents, SHARED, prefix_tokens=9)
    runs = causal_runs(tree, CPU, counted, window=window, branches_only=False)
    q, own = some(0, tree.tokens, 6), some_kv(1, tree.tokens, 2)
    assert runs.attend(q, own, prefix_of(tree), SCALE).out.shape == (1, *q.shape)
    assert calls == [tree.tokens]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_no_call_gathers_more_than_it_may_or_than_one_run_needs(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GATHERED", most)
    tree = tree_of([60, 3, 18], [Node(2)] * 40, prefix_tokens=9)
    runs = causal_runs(tree, CPU, attend_run_by_run, window=None, branches_only=False)
    gathered = [len(call.keys) for call in runs.calls]
    assert len(gathered) > 1 and max(gathered) <= most * (9 + tree.tokens)
    assert sum(gathered) == 3 * 9 + 81 + 40 * (3 * (9 + 2) + 81)


def test_a_search_below_a_long_document_is_a_few_calls() -> None:
    tree = tree_of([1], [Node(2)] * 40, prefix_tokens=900)  # the prefix is the document
    runs = causal_runs(tree, CPU, attend_run_by_run, window=None, branches_only=False)
    assert len(runs.calls) == 5


@pytest.mark.parametrize("most", [0, 1, 8])
@pytest.mark.parametrize("branches_only", [False, True])
@given(defined_trees())
def test_attending_by_runs_equals_dense_attention_under_the_mask_of_the_tree(
    most: int, branches_only: bool, defined: DefinedTree
) -> None:
    tree = defined.tree
    first = tree.document_rows if branches_only else 0
    assume(first < tree.tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GATHERED", most)  # 0: each run is a call
        runs = runs_of(defined, branches_only=branches_only)
    assert_same(*both(defined, runs, first))


def runs_of(defined: DefinedTree, *, branches_only: bool = False) -> CausalRuns:
    options: Any = {"window": defined.window, "branches_only": branches_only}
    return causal_runs(defined.tree, CPU, attend_run_by_run, **options)


def both(defined: DefinedTree, runs: CausalRuns, first: int = 0) -> tuple[Attended, Attended]:
    """The attention of the rows from the first on, and what it should be."""
    tree = defined.tree
    q, own, prefix = some(0, tree.tokens, 6)[first:], some_kv(1, tree.tokens, 2), prefix_of(tree)
    seen = seen_rows(defined)[first:]
    kept = prefix if tree.prefix_tokens else None
    return runs.attend(q, own, kept, SCALE), dense(q[None], joined(prefix, own), seen)


def one_position_more(call: RunsCall) -> RunsCall:
    return replace(call, batch=replace(call.batch, window=5))


def one_position_less(call: RunsCall) -> RunsCall:
    return replace(call, batch=replace(call.batch, window=3))


def a_later_row_of_its_own(call: RunsCall) -> RunsCall:
    keys = call.keys.clone()
    keys[-2] += 1
    return replace(call, keys=keys)


def keys_of_the_run_before(call: RunsCall) -> RunsCall:
    edges = call.batch.cu_seqlens_k.clone()
    edges[-2] -= 1
    return replace(call, batch=replace(call.batch, cu_seqlens_k=edges))


FAULTS = [one_position_more, one_position_less, a_later_row_of_its_own, keys_of_the_run_before]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: Callable[[RunsCall], RunsCall]) -> None:
    tree = tree_of([7, 9], [Node(3), Node(6)], prefix_tokens=9)
    paths = [[*range(9)]]  # of rows of the prefix and the batch
    for number, start, above in (
        *((7, 9, 0), (9, 16, 0)),
        *((3, 25, 1), (6, 28, 1), (3, 34, 2), (6, 37, 2)),
    ):
        paths.append([*paths[above], *range(start, start + number)])
    seen = torch.zeros(tree.tokens, 9 + tree.tokens, dtype=torch.bool)
    for path in paths[1:]:
        for place, row in enumerate(path):
            if row >= 9:
                seen[row - 9, path[max(0, place - 3) : place + 1]] = True
    q, own, prefix = some(0, tree.tokens, 6), some_kv(1, tree.tokens, 2), prefix_of(tree)
    right = causal_runs(tree, CPU, attend_run_by_run, window=4, branches_only=False)
    expected = dense(q[None], joined(prefix, own), seen)
    assert_same(right.attend(q, own, prefix, SCALE), expected)
    wrong = replace(right, calls=tuple(map(fault, right.calls)))
    with pytest.raises(AssertionError):
        assert_same(wrong.attend(q, own, prefix, SCALE), expected)


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
    "device, in_runs", [("cpu", False), ("cpu", True), pytest.param("cuda", True, marks=ON_CUDA)]
)
@given(defined_trees(prefix_tokens=9, min_branches=1))
def test_half_precision_equals_the_definition_and_waits_for_nothing(
    device: str, branches_only: bool, in_runs: bool, defined: DefinedTree
) -> None:
    tree = defined.tree
    rows = torch.arange(tree.document_rows if branches_only else 0, tree.tokens)
    shapes = [(tree.tokens, 6), *[(tree.tokens, 2)] * 2, *[(9, 2)] * 2]
    rounded = [some(i, *shape).bfloat16() for i, shape in enumerate(shapes)]
    q, k, v, prefix_k, prefix_v = on(device, rounded)
    kernel = flash_kernel() if device == "cuda" else attend_run_by_run
    options: Any = {"window": defined.window, "branches_only": branches_only}
    plan = plan_attention(tree, **options)
    runs = causal_runs(tree, torch.device(device), kernel, **options)
    queries, own, prefix = q[rows.to(device)], LayerKV(k, v), LayerKV(prefix_k, prefix_v)
    with no_waiting(device):
        if in_runs:
            actual = runs.attend(queries, own, prefix, SCALE)
        else:
            actual = attend_tree(queries, own, prefix, plan, scale=SCALE)
    kv = joined(LayerKV(*rounded[3:]), LayerKV(*rounded[1:3]))
    expected = dense(rounded[0][rows][None], kv, seen_rows(defined)[rows])
    # Values below 8 are rounded to bfloat16 after the weights and after each segment and merge.
    steps = 1 if in_runs else sum(map(len, plan))
    atol = 2 * (steps + 1) * 8 * torch.finfo(torch.bfloat16).eps / 2
    torch.testing.assert_close(actual.out.cpu().double(), expected.out, rtol=0, atol=atol)
    torch.testing.assert_close(actual.lse.cpu().double(), expected.lse, rtol=0, atol=1e-4)
