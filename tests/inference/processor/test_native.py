"""The processor's own kernels against their definitions in float64, as each build computes them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dense_oracle import dense, everything, needs_native
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.inference.attention import kernels
from pipeline.inference.attention.kernels import Attended, LayerKV, attend, merge_into
from pipeline.inference.processor import native

FORMATS = [torch.float32, torch.bfloat16]
# As a processor without these instructions compiles them.
BUILDS = {
    "all": (),
    "without tiles": ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16"),
    "without bfloat16": ("-mno-amx-tile", "-mno-amx-bf16", "-mno-avx512bf16"),
}


@pytest.fixture(params=BUILDS, scope="module")
def build(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_FLAGS", (*native._FLAGS, *BUILDS[request.param]))
        forget()
        yield request.param
    forget()


def forget() -> None:
    native._library.cache_clear()
    native.formats.cache_clear()
    kernels.is_native.cache_clear()


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for the compiled kernels, made by a compiler of two words."""
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    return native._compiled(f"env {compiler}", {})


@pytest.mark.parametrize("place", ["the file", "the folder"])
@pytest.mark.parametrize("fault", [0o770, 0o702, 0o777, "another user"])
def test_kernels_that_others_could_have_written_are_not_loaded(
    place: str, fault: int | str, compiled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = f"env {tmp_path / 'g++'}"
    assert native._compiled(compiler, {}) == compiled
    path = compiled if place == "the file" else compiled.parent
    if isinstance(fault, int):
        path.chmod(fault)
    elif os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        pytest.skip("only root can give a file away")
    with pytest.raises(PermissionError, match=re.escape(f"{path} is of another user")):
        native._compiled(compiler, {})


def test_a_folder_of_kernels_is_made_for_this_user_alone(compiled: Path) -> None:
    assert compiled.parent.stat().st_mode & 0o777 == compiled.stat().st_mode & 0o777 == 0o700
    assert compiled.parent.name == f"kernels-{os.geteuid()}"


@needs_native
@pytest.mark.parametrize("computed", FORMATS)
@pytest.mark.parametrize("dtype", FORMATS)
@given(
    batch=st.sampled_from([1, 3]),
    tokens=st.integers(1, 210),
    keys=st.integers(1, 210),
    heads=st.sampled_from([(6, 2), (4, 4), (3, 1)]),
    dim=st.sampled_from([8, 10, 64, 80]),
    window=st.none() | st.integers(1, 100),
    kind=st.sampled_from(["causal", "before", "split"]),
    threads=st.sampled_from([1, 2]),
)
def test_attention_is_a_softmax_over_the_keys_that_a_query_sees(
    build: str,
    dtype: torch.dtype,
    computed: torch.dtype,
    batch: int,
    tokens: int,
    keys: int,
    heads: tuple[int, int],
    dim: int,
    window: int | None,
    kind: str,
    threads: int,
) -> None:
    """Of views of larger tensors; `split`: over two spans, one merged into the other."""
    if computed not in native.formats() or computed.itemsize > dtype.itemsize:
        return
    keys = tokens if kind == "causal" else keys
    offset = 0 if kind == "causal" else keys
    q = numbers(0, batch, heads[0], tokens, 2 * dim).to(dtype).transpose(1, 2)[..., :dim]
    k, v = (numbers(i, batch, keys, heads[1] + 1, dim).to(dtype)[:, :, 1:] for i in (1, 2))
    distance = torch.arange(tokens)[:, None] + offset - torch.arange(keys)
    seen = (distance >= 0) & (distance < (window or tokens + keys))
    whole = torch.full((batch, tokens + 1, heads[0], dim + 1), torch.nan, dtype=dtype)
    out, lse = whole[:, 1:, :, 1:], torch.full((batch, heads[0], tokens), torch.nan).transpose(1, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    first = keys // 2 if kind == "split" else 0
    for start, stop in ((first, keys), (0, first)) if first else ((0, keys),):
        native.attend_into(
            *(out, lse, q, k[:, start:stop], v[:, start:stop]),
            scale=dim**-0.5,
            computed=computed,
            causal=True,
            offset=offset - start,
            window=window,
            merge=start < first,
        )
    torch.set_num_threads(before)
    rounded = LayerKV(k.to(computed), v.to(computed))
    expected = dense(q.to(computed), rounded, seen, scale=dim**-0.5)
    largest = float(expected.out.abs().max())
    # — float32: scores below 64, each rounded by half of the last bit, enter as a factor; weights
    # and results of bfloat16 are rounded by 2^-9 of values below 5
    exact = 64 * torch.finfo(torch.float32).eps
    error = exact if computed == dtype == torch.float32 else 5 * 2**-8
    assert (out.double() - expected.out).abs().max() <= error * max(1, largest)
    assert torch.equal(lse.isfinite(), expected.lse.isfinite())
    moved = (lse.double() - expected.lse).abs().nan_to_num(0.0)
    assert moved.max() <= exact
    assert bool(whole[:, 0].isnan().all()) and bool(whole[..., 0].isnan().all())


@needs_native
def test_a_nan_reaches_the_results_that_it_belongs_to(build: str) -> None:
    for dtype in native.formats():
        q, k, v = (numbers(i, 1, 40, 2, 16).to(dtype) for i in range(3))
        k[0, 7, 1, 3] = torch.nan
        own = kernels.empty_like(q)
        native.attend_into(own.out, own.lse, q, k, v, scale=0.25, computed=dtype, causal=True)
        sees = torch.zeros(40, 2, dtype=torch.bool)
        sees[7:, 1] = True
        assert torch.equal(own.out[0].isnan().all(-1), sees)
        assert torch.equal(own.lse[0].isnan(), sees)


@needs_native
@pytest.mark.parametrize("dtype", FORMATS)
@given(rows=st.integers(1, 9), inputs=st.sampled_from([1, 16, 30, 576]), seed=st.integers(0, 99))
def test_the_passes_of_a_layer_equal_their_definitions(
    build: str, dtype: torch.dtype, rows: int, inputs: int, seed: int
) -> None:
    if dtype not in native.formats():
        return
    x, y = (numbers(seed + i, rows, inputs).mul(3).to(dtype) for i in range(2))
    weight = numbers(seed + 2, inputs).to(dtype)
    exact = {name: each.double() for name, each in (("x", x), ("y", y), ("weight", weight))}
    # — of the last bit: one rounding of the result, and a few in float32
    within = {"rtol": torch.finfo(dtype).eps / 2 + 2**-20, "atol": 1e-6}
    normed = torch.empty_like(x)
    native.normalise(x, weight, 1e-5, normed)
    scale = (exact["x"].square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(normed.double(), exact["x"] * scale * exact["weight"], **within)
    gates = x.clone()
    native.gate(gates, y)
    expected = torch.nn.functional.silu(exact["x"]) * exact["y"]
    torch.testing.assert_close(gates.double(), expected, **within)
    sums = x.clone()
    native.add(sums, y)
    torch.testing.assert_close(sums.double(), exact["x"] + exact["y"], **within)


@needs_native
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("dim", [2, 10, 64, 80])
def test_a_rotation_equals_its_definition(build: str, dtype: torch.dtype, dim: int) -> None:
    if dtype not in native.formats():
        return
    x, out = (numbers(i, 1, 7, 3, dim).to(dtype) for i in range(2))
    angles = numbers(2, 1, 7, dim // 2)
    cos, sin = (torch.cat([f(angles)] * 2, -1).to(dtype) for f in (torch.cos, torch.sin))
    native.rotate(x, cos, sin, out)
    a, b = x.double().chunk(2, -1)
    c, s = (y.double().unsqueeze(2)[..., : dim // 2] for y in (cos, sin))
    expected = torch.cat([a * c - b * s, b * c + a * s], -1)
    within = {"rtol": torch.finfo(dtype).eps / 2 + 2**-20, "atol": 1e-6}
    torch.testing.assert_close(out.double(), expected, **within)


@needs_native
def test_gates_are_right_at_the_ends_of_the_exponent() -> None:
    gates = torch.tensor([0.0, -0.0, 100.0, -100.0, 3e38, -3e38, torch.inf, torch.nan])
    expected = torch.nn.functional.silu(gates)
    native.gate(gates, torch.ones(8))
    torch.testing.assert_close(gates, expected, rtol=1e-6, atol=1e-37, equal_nan=True)


@needs_native
def test_a_row_with_a_nan_has_no_step() -> None:
    x = torch.ones(3, 64)
    x[1, 40] = torch.nan
    _, steps = native.round_rows(x)
    assert steps.isnan().flatten().tolist() == [False, True, False]


@needs_native
def test_numbers_too_small_for_the_exponent_are_computed_again_after_a_kernel() -> None:
    q = torch.randn(1, 300, 2, 16)
    own = kernels.empty_like(q)
    native.attend_into(own.out, own.lse, q, q, q, scale=0.25, computed=q.dtype)
    assert float(torch.tensor([1e-40]) * 1.5) > 0


@needs_native
@pytest.mark.parametrize("fault", ["wrong", "slow"])
def test_a_kernel_that_is_wrong_or_slow_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = native.attend_into

    def faulty(out: Tensor, lse: Tensor, *tensors: Tensor, **options: object) -> None:
        for _ in range(20 if fault == "slow" else 1):
            right(out, lse, *tensors, **options)  # type: ignore[arg-type]
        if fault == "wrong":
            out[:, -1] *= 1.001

    forget()
    monkeypatch.setattr(native, "attend_into", faulty)
    assert not kernels.is_native(torch.float32, 64)
    forget()


@pytest.mark.parametrize("reason", ["off", "no compiler", "a compiler that fails", "no AVX-512"])
def test_without_kernels_torch_computes(
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if reason == "off":
        monkeypatch.setenv("ASSAY_KERNELS", "off")
    elif reason == "no AVX-512":
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    else:
        compiler = tmp_path / "c++"
        if reason == "a compiler that fails":
            compiler.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
            compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
        # — this machine may have no AVX-512
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(native._NEEDED, 1))
    forget()
    assert native.formats() == frozenset()
    assert ("no such header" in caplog.text) == (reason == "a compiler that fails")
    assert len(caplog.records) == ("compiler" in reason)
    assert ("No such file" in caplog.text) == (reason == "no compiler")
    q, k, v = numbers(0, 1, 9, 6, 8), numbers(1, 1, 9, 2, 8), numbers(2, 1, 9, 2, 8)
    found = attend(q, k, v, scale=8**-0.5, causal=True)
    expected = dense(q, LayerKV(k, v), everything(9, 9).tril())
    assert (found.out - expected.out).abs().max() < 1e-5
    forget()


@needs_native
def test_processes_that_start_at_once_share_one_compiled_file(tmp_path: Path) -> None:
    code = "from pipeline.inference.processor import native; print(len(native.formats()))"
    command = [sys.executable, "-c", code]
    environment = {"ASSAY_CACHE": str(tmp_path), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(3)]
    printed = {process.communicate(timeout=120)[0] for process in started}
    assert printed in ({b"1\n"}, {b"2\n"})
    [library] = (tmp_path / f"kernels-{os.geteuid()}").iterdir()
    assert not library.stat().st_mode & 0o077
    written = library.stat().st_mtime_ns
    subprocess.run(command, env=environment, check=True, timeout=120)
    assert library.stat().st_mtime_ns == written


@needs_native
@pytest.mark.parametrize("computed", [None, torch.bfloat16])
def test_merging_in_the_kernel_equals_merging_by_log_sum_exp(computed: torch.dtype | None) -> None:
    if (computed or torch.float32) not in native.formats():
        pytest.skip("no bfloat16 products")
    q, k, v = numbers(0, 1, 50, 6, 16), numbers(1, 1, 90, 2, 16), numbers(2, 1, 90, 2, 16)

    def over(start: int, stop: int, into: Attended | None = None) -> Attended:
        span = k[:, start:stop], v[:, start:stop]
        merge = into is not None
        return attend(q, *span, scale=0.25, computed=computed, into=into, merge=merge)

    whole = over(0, 40)
    merge_into(whole, over(40, 90))
    merged = over(40, 90, into=over(0, 40))
    # — weights of bfloat16 are rounded by 2^-9, of values below 5
    atol = 5 * 2**-8 if computed else 1e-5
    torch.testing.assert_close(merged.out, whole.out, rtol=0, atol=atol)
    torch.testing.assert_close(merged.lse, whole.lse, rtol=0, atol=1e-5)
