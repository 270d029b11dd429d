"""The processor's own kernels against their definitions in float64, as each build computes them."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_oracle import BUILDS, forget, needs_native, numbers, of_build, views
from hypothesis import given
from hypothesis import strategies as st
from random_trees import Node, tree_of

from pipeline.errors import ModelError
from pipeline.inference.attention.reference import LayerKV, attend_plainly
from pipeline.inference.attention.tiles import tile_plan
from pipeline.inference.loading import prepare
from pipeline.inference.model.operations import PLAIN
from pipeline.inference.model.rounded_products import even_out
from pipeline.inference.processor import native
from pipeline.inference.processor.native import attend_natively
from pipeline.inference.proof import tree_error

FORMATS = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")


@pytest.fixture(params=BUILDS, scope="module")
def build(request: pytest.FixtureRequest) -> Iterator[str]:
    with of_build(request.param):
        yield request.param


@pytest.mark.parametrize("computed", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    ("heads", "dim", "window"),
    [
        ((6, 2), 8, None),
        ((4, 4), 80, 70),
        ((9, 3), 64, None),
        ((9, 3), 64, 70),
        ((14, 1), 10, 70),
        ((400, 1), 130, None),
    ],
)
def test_attention_of_views_is_that_of_the_reference(
    build: str,
    dtype: torch.dtype,
    computed: torch.dtype | None,
    heads: tuple[int, int],
    dim: int,
    window: int | None,
) -> None:
    """With several blocks of keys in the prefix and in documents, and documents of one row."""
    products = computed or (dtype if native.computes(dtype) else torch.float32)
    if computed and not native.computes(computed):
        pytest.skip(f"no products of {computed}")
    tree = tree_of([150, 1, 70], [Node(3, (Node(2), Node(40))), Node(6)], prefix_tokens=140)
    plan = tile_plan(tree, CPU, window=window, branches_only=False)
    q = views(0, tree.tokens, heads[0], dim, dtype)
    k, v, prefix_k, prefix_v = (
        views(i, rows, heads[1], dim, dtype)
        for i, rows in enumerate((tree.tokens, tree.tokens, 140, 140), 1)
    )
    inputs = [LayerKV(k, v), LayerKV(prefix_k, prefix_v)]
    actual = attend_natively(q, *inputs, plan, dim**-0.5, None, computed)
    narrow = [x.to(products).double() for x in (q, k, v, prefix_k, prefix_v)]
    exact = [LayerKV(*narrow[1:3]), LayerKV(*narrow[3:])]
    expected = attend_plainly(narrow[0], *exact, plan, dim**-0.5, None)
    largest = max(1.0, float(expected.out.abs().max()))
    # — float32: scores below 64, each rounded by half of the last bit, enter as a factor; weights
    # and results of bfloat16 are rounded by 2^-9 of values below 5
    rounds = torch.bfloat16 in (dtype, products)
    error = 5 * 2**-8 if rounds else 64 * torch.finfo(torch.float32).eps
    assert (actual.out.double() - expected.out).abs().max() <= error * largest
    assert (actual.lse.double() - expected.lse).abs().max() <= 64 * torch.finfo(torch.float32).eps


def test_a_nan_reaches_the_results_that_it_belongs_to(build: str) -> None:
    tree = tree_of([40], prefix_tokens=0)
    plan = tile_plan(tree, CPU, window=None, branches_only=False)
    for dtype in FORMATS:
        q, k, v = (numbers(i, 40, 2, 16).to(dtype) for i in range(3))
        k[7, 1, 3] = torch.nan
        own = attend_natively(q, LayerKV(k, v), None, plan, 0.25, None)
        sees = torch.zeros(40, 2, dtype=torch.bool)
        sees[7:, 1] = True
        assert torch.equal(own.out.isnan().all(-1), sees)
        assert torch.equal(own.lse.isnan(), sees)


def test_what_one_document_has_is_in_no_other_ones_results(build: str) -> None:
    tree = tree_of([150, 90], [Node(5)], prefix_tokens=70)
    plan = tile_plan(tree, CPU, window=None, branches_only=False)
    q, k, v, p = (numbers(i, n, 2, 16) for i, n in enumerate((250, 250, 250, 70)))
    before = attend_natively(q, LayerKV(k, v), LayerKV(p, p), plan, 0.25, None)
    own = [*range(150), *range(240, 245)]
    for x in (q, k, v):
        x[own] = torch.nan
    after = attend_natively(q, LayerKV(k, v), LayerKV(p, p), plan, 0.25, None)
    other = [*range(150, 240), *range(245, 250)]
    assert torch.equal(before.out[other], after.out[other])
    assert after.out[own].isnan().all()


def test_a_documents_results_do_not_depend_on_the_place_in_its_batch(build: str) -> None:
    q, k, v = (numbers(i, 150, 2, 16) for i in range(3))
    outputs = []
    for before in (0, 37):
        rows = [*range(before), *range(150)]
        tree = tree_of([before, 150] if before else [150], prefix_tokens=0)
        plan = tile_plan(tree, CPU, window=None, branches_only=False)
        out = attend_natively(q[rows], LayerKV(k[rows], v[rows]), None, plan, 0.25, None).out
        outputs.append(out[before:])
    assert torch.equal(*outputs)


@pytest.mark.parametrize("dtype", FORMATS)
@given(rows=st.integers(1, 9), inputs=st.sampled_from([1, 16, 30, 576]), seed=st.integers(0, 99))
def test_the_operations_of_a_layer_equal_their_definitions(
    build: str, dtype: torch.dtype, rows: int, inputs: int, seed: int
) -> None:
    x, y = (numbers(seed + i, rows, inputs).mul(3).to(dtype) for i in range(2))
    weight = numbers(seed + 2, inputs).to(dtype)
    exact = {name: each.double() for name, each in (("x", x), ("y", y), ("weight", weight))}
    # — of the last bit: one rounding of the result, and a few in float32
    within = {"rtol": torch.finfo(dtype).eps / 2 + 2**-20, "atol": 1e-6}
    normed = native.normalise(x, weight, 1e-5)
    scale = (exact["x"].square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(normed.double(), exact["x"] * scale * exact["weight"], **within)
    gates = native.gate(x.clone(), y)
    expected = torch.nn.functional.silu(exact["x"]) * exact["y"]
    torch.testing.assert_close(gates.double(), expected, **within)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("dim", [2, 10, 64, 80])
def test_a_rotation_equals_its_definition(
    build: str, dtype: torch.dtype, dim: int, normed: bool
) -> None:
    whole = numbers(0, 7, 5, dim).to(dtype)
    x, weight = whole[:, 1:4], numbers(1, dim).to(dtype)
    angles = numbers(2, 7, dim // 2)
    cos, sin = (torch.cat([f(angles)] * 2, -1).to(dtype) for f in (torch.cos, torch.sin))
    before, exact = whole.clone(), x.double()
    if normed:
        exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        exact = exact.to(dtype).double()
    native.rotate(x, cos, sin, weight if normed else None, 1e-5)
    a, b = exact.chunk(2, -1)
    c, s = (y.double().unsqueeze(1)[..., : dim // 2] for y in (cos, sin))
    expected = torch.cat([a * c - b * s, b * c + a * s], -1)
    # — a norm that is rounded to the other neighbour moves a sum of two products
    steps = 3 if normed else 1
    eps = torch.finfo(dtype).eps
    atol = 1e-6 + (eps * float(expected.abs().max()) if normed else 0.0)
    torch.testing.assert_close(x.double(), expected, rtol=steps * eps / 2 + 2**-20, atol=atol)
    assert torch.equal(whole[:, [0, 4]], before[:, [0, 4]])


def test_gates_are_right_at_the_ends_of_the_exponent(build: str) -> None:
    gates = torch.tensor([0.0, -0.0, 100.0, -100.0, 3e38, -3e38, torch.inf, torch.nan])
    expected = torch.nn.functional.silu(gates)
    native.gate(gates, torch.ones(8))
    torch.testing.assert_close(gates, expected, rtol=1e-6, atol=1e-36, equal_nan=True)


@pytest.mark.parametrize("inputs", [32, 64, 576])
def test_rows_are_evened_out_and_rounded_to_their_nearest_steps(build: str, inputs: int) -> None:
    x = numbers(0, 5, inputs)
    x[3] = 0
    rounded, steps = native.round_rows(x)
    exact = even_out(x.double())
    sizes = exact.abs().amax(-1, keepdim=True) / 127
    torch.testing.assert_close(steps[x.any(-1)].double(), sizes[x.any(-1)], rtol=1e-6, atol=0)
    distance = (rounded.double() - 128) * steps.double() - exact
    assert (distance.abs() <= 0.5001 * steps.double()).all()


def test_a_row_with_a_nan_has_no_step(build: str) -> None:
    x = torch.ones(3, 64)
    x[1, 40] = torch.nan
    _, steps = native.round_rows(x)
    assert steps.isnan().flatten().tolist() == [False, True, False]


def test_numbers_too_small_for_the_exponent_are_computed_again_after_a_kernel(build: str) -> None:
    q = torch.randn(300, 2, 16)
    plan = tile_plan(tree_of([300], prefix_tokens=0), CPU, window=None, branches_only=False)
    attend_natively(q, LayerKV(q, q), None, plan, 0.25, None)
    assert float(torch.tensor([1e-40]) * 1.5) > 0


@pytest.mark.parametrize(
    ("features", "builds"),
    [
        ({}, []),
        ({"avx2": True}, ["avx2"]),
        (dict.fromkeys(["avx2", *native._AVX512], True), ["avx512", "avx2"]),
        (
            dict.fromkeys(["avx2", *native._BUILDS["avx512bf16"]], True),
            ["avx512bf16", "avx512", "avx2"],
        ),
        (
            dict.fromkeys(["avx2", *native._BUILDS["amx"]], True),
            ["amx", "avx512bf16", "avx512", "avx2"],
        ),
    ],
)
def test_a_processor_has_the_builds_whose_instructions_it_has(
    features: dict[str, bool], builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_may_use_tiles", lambda: True)
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    assert native._runnable(features) == builds


@needs_native
def test_another_build_or_none_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with of_build("off"):
        assert native.build() is None
        assert not native.takes(torch.float32) and not native.computes(torch.float32)
    with of_build(BUILDS[-1]):
        assert native.build() == BUILDS[-1]
    with of_build("sse2"), pytest.raises(ModelError, match="ASSAY_KERNELS is 'sse2', and this"):
        native.build()


def test_an_installation_without_kernels_computes_by_torch(
    make_network: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_library", lambda: None)
    forget()
    model = prepare(make_network("llama"))
    assert model.llama is not None and model.llama.operations is PLAIN
    assert model.processor["attention"] == "torch float32"
    assert tree_error(model) < 1e-5
    forget()


@needs_native
def test_each_build_keeps_to_its_own_instructions() -> None:
    """A function that two builds shared would have the instructions of one of them."""
    library = native._library()
    assert library is not None
    listed = subprocess.run(
        ["nm", "--dynamic", "--defined-only", str(Path(library._name))],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    names = {name for name in listed[2::3] if not name.startswith("_")}
    functions = ("attend", "gate", "normalise", "rotate", "round_rows")
    assert names == {f"{name}_{build}" for name in functions for build in native._BUILDS}
    assert isinstance(library, ctypes.CDLL)
    # — a folder that others may write, such as a shared cache, would give them this process
    assert Path(library._name).parent == Path(native.__file__).parent
