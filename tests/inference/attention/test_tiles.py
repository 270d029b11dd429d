"""Attention by tiles equals dense attention under the mask of the tree, and waits for nothing.

Triton's interpreter runs the kernel itself on a CPU, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_oracle import (
    BUILDS,
    SCALE,
    assert_same,
    dense,
    joined,
    needs_native,
    of_build,
    prefix_of,
    seen_rows,
    some,
    some_kv,
)
from hypothesis import assume, given
from hypothesis import strategies as st
from random_trees import DefinedTree, Node, _defined_paths, defined_trees, tree_of
from torch import Tensor

from pipeline.inference import loading, proof
from pipeline.inference.attention import reference
from pipeline.inference.attention.reference import Attended, LayerKV, attend_plainly
from pipeline.inference.attention.tiles import Kernel, tile_plan
from pipeline.inference.processor.native import attend_natively
from pipeline.inference.proof import tree_error

CPU = torch.device("cpu")


CAPS = st.sampled_from([None, 5.0])


@pytest.mark.parametrize("rows", [1, 3, 64])
@given(defined_trees(), CAPS, st.booleans())
def test_the_reference_is_dense_attention_under_the_mask_of_the_tree(
    rows: int, defined: DefinedTree, softcap: float | None, branches_only: bool
) -> None:
    assume(defined.tree.tokens > (defined.tree.document_rows if branches_only else 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_ROWS", rows)
        assert_same(*both(attend_plainly, defined, softcap=softcap, branches_only=branches_only))


def test_the_reference_takes_fewer_rows_at_once_of_a_document_of_many_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores, softmax, tree = list[int](), reference._softmax, tree_of([300], prefix_tokens=45)

    def counted(q: Tensor, k: Tensor, *rest: Any) -> Any:
        scores.append(len(q) * q.shape[1] * len(k))
        return softmax(q, k, *rest)

    most = 8 * 6 * 345  # of eight rows and six heads, with all keys
    monkeypatch.setattr(reference, "_SCORES", most)
    monkeypatch.setattr(reference, "_softmax", counted)
    plan = tile_plan(tree, CPU, window=None, branches_only=False)
    q, own = some(0, tree.tokens, 6), some_kv(1, tree.tokens, 2)
    attend_plainly(q, own, prefix_of(tree), plan, SCALE, None)
    assert most / 2 < max(scores) <= most


@needs_native
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("branches_only", [False, True])
@given(defined_trees(most_tokens=150), CAPS)
def test_every_build_is_dense_attention_under_the_mask_of_the_tree(
    build: str, branches_only: bool, defined: DefinedTree, softcap: float | None
) -> None:
    assume(defined.tree.tokens > (defined.tree.document_rows if branches_only else 0))
    with of_build(build):
        assert_same(*both(attend_natively, defined, softcap=softcap, branches_only=branches_only))


def both(
    kernel: Kernel, defined: DefinedTree, *, softcap: float | None, branches_only: bool
) -> tuple[Attended, Attended]:
    """The attention of the rows from the first on, and what it should be."""
    tree = defined.tree
    first = tree.document_rows if branches_only else 0
    plan = tile_plan(tree, CPU, window=defined.window, branches_only=branches_only)
    q, own, prefix = some(0, tree.tokens, 6)[first:], some_kv(1, tree.tokens, 2), prefix_of(tree)
    kept = prefix if tree.prefix_tokens else None
    expected = dense(q, joined(prefix, own), seen_rows(defined)[first:], softcap=softcap)
    return kernel(q, own, kept, plan, SCALE, softcap), expected


@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_tiles_hold_each_row_once_and_none_of_two_documents(rows: int, window: int | None) -> None:
    tree = tree_of([60, 3, 18], [Node(4, (Node(2), Node(3))), Node(6)], prefix_tokens=9)
    plan = tile_plan(tree, CPU, window=window, branches_only=False)
    tiles = plan.tiles(rows)
    assert plan.tiles(rows) is tiles
    held = [row for first, stop, *_ in tiles.tolist() for row in range(first, stop)]
    assert held == list(range(tree.tokens))
    assert max(stop - first for first, stop, *_ in tiles.tolist()) <= rows
    starts = [*tree.document_starts, *tree.branch_starts.tolist()]
    piece = [sum(row >= start for start in starts) - 1 for row in range(tree.tokens)]
    assert all(piece[first] == piece[stop - 1] for first, stop, *_ in tiles.tolist())
    assert all(piece[first] % 3 == document for first, *_, document in tiles.tolist())


def test_a_window_leaves_out_the_keys_that_no_row_of_a_tile_sees() -> None:
    tree = tree_of([100], [Node(4)], prefix_tokens=20)
    plan = tile_plan(tree, CPU, window=10, branches_only=False)
    # first, stop, of the prefix from, of the document from and to, own from, document
    assert plan.tiles(40).tolist() == [
        [0, 40, 11, 0, 0, 0, 0],
        [40, 80, 20, 31, 40, 40, 0],
        [80, 100, 20, 71, 80, 80, 0],
        [100, 104, 20, 91, 100, 100, 0],
    ]
    assert plan.document_starts.tolist() == [0, 100]


@pytest.mark.parametrize("kernel", ["triton", pytest.param("native", marks=needs_native)])
def test_values_of_another_size_than_the_keys_are_refused(kernel: str) -> None:
    if kernel == "triton":
        pytest.importorskip("triton")
        from pipeline.inference.attention.triton_tiles import attend_tiles
    attend = attend_tiles if kernel == "triton" else attend_natively
    plan = tile_plan(tree_of([5], [], prefix_tokens=0), CPU, window=None, branches_only=False)
    own = LayerKV(k=torch.zeros(5, 2, 8), v=torch.zeros(5, 2, 4))
    with pytest.raises(ValueError, match="keys of 8 numbers and values of 4 a head"):
        attend(torch.zeros(5, 6, 8), own, None, plan, SCALE, None)


def test_a_gpu_attends_by_triton_in_float32_too() -> None:
    pytest.importorskip("triton")
    network: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    assert [*loading.kernels_for(network)] == ["triton float32", "torch float32"]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_tritons_interpreter_computes_the_same() -> None:
    """Interpreted kernels are made at import, so another process has to import them."""
    tests = Path(__file__).parents[2]
    paths = os.pathsep.join(map(str, (tests.parent, tests, tests / "support")))
    own = {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": paths}
    environment, command = {**os.environ, **own}, [sys.executable, __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3_000:]
    assert run.stdout.split() == ["attention", "blocks", "operations", "models"]


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
    "kernel", ["plain", *BUILDS, pytest.param("triton on cuda", marks=ON_CUDA)]
)
@given(defined_trees(prefix_tokens=9, min_branches=1))
def test_half_precision_equals_the_definition_and_waits_for_nothing(
    kernel: str, branches_only: bool, defined: DefinedTree
) -> None:
    tree, device = defined.tree, kernel.partition(" on ")[2] or "cpu"
    rows = torch.arange(tree.document_rows if branches_only else 0, tree.tokens)
    shapes = [(tree.tokens, 6), *[(tree.tokens, 2)] * 2, *[(9, 2)] * 2]
    rounded = [some(i, *shape).bfloat16() for i, shape in enumerate(shapes)]
    q, k, v, prefix_k, prefix_v = on(device, rounded)
    options: Any = {"window": defined.window, "branches_only": branches_only}
    tiles = tile_plan(tree, torch.device(device), **options)
    inputs = q[rows.to(device)], LayerKV(k, v), LayerKV(prefix_k, prefix_v)
    if kernel in BUILDS:
        with of_build(kernel):
            actual = attend_natively(*inputs, tiles, SCALE, None)
    elif kernel == "plain":
        actual = attend_plainly(*inputs, tiles, SCALE, None)
    else:
        from pipeline.inference.attention.triton_tiles import attend_tiles

        with no_waiting(device):
            actual = attend_tiles(*inputs, tiles, SCALE, None)
    kv = joined(LayerKV(*rounded[3:]), LayerKV(*rounded[1:3]))
    expected = dense(rounded[0][rows], kv, seen_rows(defined)[rows])
    # — values below 8 are rounded to bfloat16 after the weights, and as results
    atol = 4 * 8 * torch.finfo(torch.bfloat16).eps / 2
    torch.testing.assert_close(actual.out.cpu().double(), expected.out, rtol=0, atol=atol)
    # — scores below 64 are rounded by the products of the plain kernel alone
    within = 64 * torch.finfo(torch.bfloat16).eps if kernel == "plain" else 1e-4
    torch.testing.assert_close(actual.lse.cpu().double(), expected.lse, rtol=0, atol=within)


def attention_is_that_of_the_tree() -> None:
    """Run in Triton's interpreter, which has no products in bfloat16: a GPU checks those.

    Its blocks have 16 keys, and its tiles 10 rows: each loop of the kernel runs several times, and
    ends within a block.
    """
    from pipeline.inference.attention.triton_tiles import attend_tiles

    documents, branches = [37, 0, 16, 3], (Node(4, (Node(2), Node(13))), Node(19))
    for prefix_tokens, window, softcap in [(0, None, None), (37, None, 5.0), (37, 21, None)]:
        tree = tree_of(documents, branches, prefix_tokens=prefix_tokens)
        paths = _defined_paths(documents, branches, prefix_tokens)
        defined = DefinedTree(branches, tree, tuple(paths), window)
        for branches_only in (False, True):
            assert_same(*both(attend_tiles, defined, softcap=softcap, branches_only=branches_only))


def keys_of_other_questions_alone_are_not_read() -> None:
    """A block of them is left out: their weight of 0 would be NaN here, times a value of NaN."""
    from pipeline.inference.attention.triton_tiles import attend_tiles

    tree = tree_of([16], [Node(2, (Node(20), Node(20), Node(20)))], prefix_tokens=0)
    plan = tile_plan(tree, CPU, window=None, branches_only=True)
    q, own = some(0, tree.tokens, 6)[16:], some_kv(1, tree.tokens, 2)
    before = attend_tiles(q, own, None, plan, SCALE, None)
    own.v[32:48] = torch.nan  # the second block below the document, of the first two questions
    after = attend_tiles(q, own, None, plan, SCALE, None)
    # — the last two tiles, whose rows are all of the third question
    assert torch.equal(after.out[50:], before.out[50:])


def operations_are_their_definitions() -> None:
    from pipeline.inference.model import triton_operations as kernels

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, gates, ups = (torch.randn(9, 6, 64).to(dtype) for _ in range(3))
        cos, sin = torch.randn(2, 9, 64).to(dtype)
        weight = torch.randn(64).to(dtype)
        rotated, normed_too = x.clone(), x.clone()
        kernels.rotate(rotated, cos, sin, None, 0.0)
        kernels.rotate(normed_too, cos, sin, weight, 1e-5)
        normed = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        normed *= weight.double()
        gated = gates.double() * gates.double().sigmoid() * ups.double()
        flat = gates.flatten(1).clone(), ups.flatten(1)
        expected = {
            "rotated": (rotated, *_rotated(x.double(), cos, sin)),
            "normed, rotated": (normed_too, *_rotated(normed, cos, sin)),
            "normed": (kernels.normalise(x, weight, 1e-5), normed, normed.abs()),
            "gated": (kernels.gate(*flat).view_as(x), gated, gated.abs()),
        }
        result, single = torch.finfo(dtype), torch.finfo(torch.float32)
        # — Triton's interpreter cuts off the digits that bfloat16 lacks
        last = result.eps if dtype == torch.bfloat16 else result.eps / 2
        for name, (actual, value, terms) in expected.items():
            # — at most 13 roundings to float32 (a mean's count by half), and one to the result
            within = 13 * single.eps / 2 * terms + last * (value.abs() + result.tiny)
            assert ((actual.double() - value).abs() <= within).all(), (name, dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotary embedding by its definition, and the sum of its terms without their signs."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    terms = x * cos.double()[:, None], turned * sin.double()[:, None]
    return terms[0] + terms[1], terms[0].abs() + terms[1].abs()


def models_use_it() -> None:
    """With layers of the Llama form, windows and capped scores, attention sinks."""
    from conftest import random_network  # — tests/ is on the path of this program alone

    from pipeline.inference.attention.triton_tiles import attend_tiles

    loading.kernels_for = lambda _network: {"triton": attend_tiles}
    loading.prove_tree = lambda _model: None  # — the proof below, with a larger tolerance
    proof._LONG_TOKENS = 3 * 16 + 5  # — the interpreter's blocks have 16 keys
    for family in ("qwen3", "gemma2", "gpt_oss"):
        model = loading.prepare(random_network(family))
        assert model.kernel is attend_tiles, family
        assert tree_error(model) < 1e-5, family


if __name__ == "__main__":
    attention_is_that_of_the_tree()
    print("attention")
    keys_of_other_questions_alone_are_not_read()
    print("blocks")
    operations_are_their_definitions()
    print("operations")
    models_use_it()
    print("models")
