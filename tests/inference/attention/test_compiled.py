"""Compiled launches equal the plan they were made of, view all keys, and never wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from dense_oracle import SCALE, assert_same, dense, joined, seen_rows, some, some_kv
from torch import Tensor

from pipeline.inference.attention.compiled import CompiledPlan, KernelCall, compile_plans
from pipeline.inference.attention.kernels import Attended, LayerKV, attend_tree
from pipeline.inference.attention.plan import AttentionPlan, Segment, plan_attention, plan_ends
from pipeline.inference.attention.tree import Node, Tree
from pipeline.inference.attention.varlen import Kernel, Runs, attend_run_by_run, flash_kernel

Grow = Callable[..., Any]

CPU = torch.device("cpu")
SEEDS = range(8)
PREFIXES = [0, 9]
WINDOWS = [None, 1, 3, 16]


def compiled(
    plan: AttentionPlan, device: torch.device = CPU, kernel: Kernel = attend_run_by_run
) -> CompiledPlan:
    return compile_plans({None: plan}, device, kernel)[None]


def some_ends(tree: Tree, seed: int) -> list[int]:
    return [span.stop - 1 for span in tree.spans][:: 1 + seed % 2]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("prefix_tokens", PREFIXES)
@pytest.mark.parametrize("window", WINDOWS)
def test_launches_over_a_tree_equal_dense_attention_under_its_mask(
    seed: int, prefix_tokens: int, window: int | None, grow: Grow
) -> None:
    grown = grow(seed, prefix_tokens=prefix_tokens)
    q, own = some(seed, grown.tree.tokens, 6), some_kv(seed + 1, grown.tree.tokens, 2)
    prefix = some_kv(seed + 3, prefix_tokens, 2)
    launches = compiled(plan_attention(grown.tree, window=window))
    attended = launches.attend(q, own, prefix if prefix_tokens else None, scale=SCALE)
    assert_same(attended, dense(q[None], joined(prefix, own), seen_rows(grown, window)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("prefix_tokens", PREFIXES)
@pytest.mark.parametrize("window", WINDOWS)
def test_launches_at_the_ends_equal_dense_attention_there(
    seed: int, prefix_tokens: int, window: int | None, grow: Grow
) -> None:
    grown = grow(seed, prefix_tokens=prefix_tokens)
    ends = some_ends(grown.tree, seed)
    if not ends:
        return
    rows = grown.tree.rows_at(ends)
    q, own = some(seed, grown.tree.tokens, 6)[rows], some_kv(seed + 1, grown.tree.tokens, 2)
    prefix = some_kv(seed + 3, prefix_tokens, 2)
    launches = compiled(plan_ends(grown.tree, ends, window=window))
    attended = launches.attend(q, own, prefix if prefix_tokens else None, scale=SCALE)
    assert_same(attended, dense(q[None], joined(prefix, own), seen_rows(grown, window)[rows]))


def test_plans_of_all_windows_are_compiled_together(grow: Grow) -> None:
    tree = grow(3, prefix_tokens=9).tree
    q, own, prefix = some(0, tree.tokens, 6), some_kv(1, tree.tokens, 2), some_kv(3, 9, 2)
    plans = {window: plan_attention(tree, window=window) for window in WINDOWS}
    together = compile_plans(plans, CPU, attend_run_by_run)
    for window, plan in plans.items():
        attended = together[window].attend(q, own, prefix, scale=SCALE)
        assert_same(attended, attend_tree(q, own, prefix, plan, scale=SCALE))


SHARED = [Node(4, (Node(2), Node(3))), Node(6), Node(5, (Node(1), Node(1)))]


@pytest.mark.parametrize("documents", [1, 5, 40])
def test_the_launches_of_a_layer_do_not_grow_with_the_batch(documents: int) -> None:
    plan = plan_attention(Tree.of([7] * documents, SHARED, prefix_tokens=9), window=None)
    launches = compiled(plan)
    # The prefix, the documents, and two prefixes that questions share.
    assert len(launches.merged) == 4
    assert all(isinstance(step, KernelCall) for step in launches.merged)


def test_rows_are_gathered_for_shared_prefixes_alone() -> None:
    tree = Tree.of([30, 12], SHARED, prefix_tokens=9)
    launches = compiled(plan_attention(tree, window=None))
    viewed = [isinstance(s, KernelCall) and isinstance(s.rows, slice) for s in launches.merged]
    assert viewed == [True, True, False, False]


def test_only_calls_that_hide_keys_from_some_queries_stay_calls() -> None:
    plan = plan_attention(Tree.of([30, 3], SHARED, prefix_tokens=9), window=12)
    hiding = {c for level in plan.levels for c in level if c.window and not c.causal}
    stayed = [step for step in compiled(plan).merged if isinstance(step, Segment)]
    assert set(stayed) == hiding and len(stayed) == len(hiding) > 0


def pointer(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("window", [None, 5, 20])
@pytest.mark.parametrize("at_ends", [False, True])
def test_the_kernel_reads_all_keys_and_values_where_they_lie(
    window: int | None, at_ends: bool
) -> None:
    tree = Tree.of([40, 3, 18], SHARED, prefix_tokens=9)
    ends = [span.stop - 1 for span in tree.spans]
    plan = plan_ends(tree, ends, window=window) if at_ends else plan_attention(tree, window=window)
    q, own, prefix = some(0, tree.tokens, 6), some_kv(1, tree.tokens, 2), some_kv(3, 9, 2)
    reached: list[tuple[int, int]] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, runs: Runs, *, scale: float) -> Attended:
        reached.append((pointer(k), pointer(v)))
        return attend_run_by_run(q, k, v, runs, scale=scale)

    rows = tree.rows_at(ends) if at_ends else slice(None)
    compiled(plan, kernel=watched).attend(q[rows], own, prefix, scale=SCALE)
    assert len(reached) >= 2
    assert set(reached) <= {(pointer(kv.k), pointer(kv.v)) for kv in (own, prefix)}


def on(device: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


@pytest.mark.parametrize("window", WINDOWS)
def test_the_layer_loop_reads_nothing_back_from_the_device(window: int | None, grow: Grow) -> None:
    """Tensors on the meta device have no numbers: whoever asks for one gets an error."""
    tree = grow(3, prefix_tokens=9).tree
    launches = compiled(plan_attention(tree, window=window), torch.device("meta"), on_paper)
    q, *kv = on("meta", [some(0, tree.tokens, 6), *[some(0, n, 2) for n in (tree.tokens, 9)] * 2])
    attended = launches.attend(q, LayerKV(*kv[::2]), LayerKV(*kv[1::2]), scale=SCALE)
    assert attended.out.shape == (1, tree.tokens, 6, q.shape[-1])
    with pytest.raises(RuntimeError, match="meta"):
        attended.lse.max().item()


def on_paper(q: Tensor, k: Tensor, v: Tensor, runs: Runs, *, scale: float) -> Attended:
    tokens, heads, _ = q.shape
    return Attended(torch.empty_like(q)[None], q.new_empty(1, tokens, heads, dtype=torch.float32))


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("at_ends", [False, True])
def test_launches_in_half_precision_equal_the_definition_and_wait_for_nothing(
    device: str, seed: int, window: int | None, at_ends: bool, grow: Grow
) -> None:
    grown = grow(seed, prefix_tokens=9)
    tree, ends = grown.tree, some_ends(grown.tree, seed)
    if at_ends and not ends:
        return
    rows = torch.from_numpy(tree.rows_at(ends)) if at_ends else torch.arange(tree.tokens)
    plan = plan_ends(tree, ends, window=window) if at_ends else plan_attention(tree, window=window)
    shapes = [(tree.tokens, 6), *[(tree.tokens, 2)] * 2, *[(9, 2)] * 2]
    rounded = [some(i, *shape).bfloat16() for i, shape in enumerate(shapes)]
    q, k, v, prefix_k, prefix_v = on(device, rounded)
    kernel = flash_kernel() if device == "cuda" else attend_run_by_run
    launches, asked = compiled(plan, torch.device(device), kernel), q[rows.to(device)]
    with no_waiting(device):
        found = launches.attend(asked, LayerKV(k, v), LayerKV(prefix_k, prefix_v), scale=SCALE)
    kv = joined(LayerKV(*rounded[3:]), LayerKV(*rounded[1:3]))
    expected = dense(rounded[0][rows][None], kv, seen_rows(grown, window)[rows])
    # Values below 8 are rounded to bfloat16 after the weights and after each launch and merge.
    atol = 2 * (len(launches.merged) + 2) * 8 * torch.finfo(torch.bfloat16).eps / 2
    torch.testing.assert_close(found.out.cpu().double(), expected.out, rtol=0, atol=atol)
    torch.testing.assert_close(found.lse.cpu().double(), expected.lse, rtol=0, atol=1e-4)
