"""Passes in Triton are used where they work and are right, and the plain ones elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.inference import model as package
from pipeline.inference.model.passes import NATIVE, PLAIN, passes, proved
from pipeline.inference.processor import native

KERNELS = "pipeline.inference.model.triton_passes"


def four_steps_off(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """Wrong by 4 of bfloat16's steps of 1/128; 2 are allowed."""
    return PLAIN.gate(gates, ups) * (1 + 1 / 32)


def without_a_compiler(*_args: object) -> torch.Tensor:
    raise RuntimeError("Failed to find C compiler")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("gate", "used"), [(PLAIN.gate, True), (four_steps_off, False), (without_a_compiler, False)]
)
def test_kernels_are_used_only_if_they_are_right(
    gate: Callable[..., Any], used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = SimpleNamespace(normalise=PLAIN.normalise, rotate=PLAIN.rotate, gate=gate)
    monkeypatch.setitem(sys.modules, KERNELS, kernels)
    monkeypatch.setattr(package, "triton_passes", kernels, raising=False)
    assert (proved("cpu", torch.bfloat16) is not PLAIN) == used


def test_without_triton_the_passes_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setitem(sys.modules, "triton.errors", None)
    assert proved("cpu", torch.bfloat16) is PLAIN


def test_a_processor_has_passes_of_its_own() -> None:
    assert passes("cpu", torch.float32) is (NATIVE if native.formats() else PLAIN)
    assert passes("meta", torch.float32) is PLAIN


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("hidden, heads, dim", [(576, 9, 64), (1_536, 12, 128), (5_120, 40, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_passes_on_a_gpu_equal_the_plain_ones(
    hidden: int, heads: int, dim: int, dtype: torch.dtype
) -> None:
    fused, rows = passes("cuda", dtype), 77
    assert fused is not PLAIN

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
        atol = 2 * torch.finfo(dtype).eps * float(expected.abs().max())
        torch.testing.assert_close(actual.float(), expected, rtol=0, atol=atol)

    x, weight, gates, ups = some(rows, hidden), some(hidden), some(rows, hidden), some(rows, hidden)
    close(fused.normalise(x, weight, 1e-5), PLAIN.normalise(x.float(), weight.float(), 1e-5))
    expected = PLAIN.gate(gates.float(), ups.float())
    close(fused.gate(gates, ups), expected)
    q, cos, sin = some(1, rows, heads, dim), some(1, rows, dim), some(1, rows, dim)
    for norm in (None, some(dim)):
        out, wide = torch.empty_like(q), torch.empty_like(q, dtype=torch.float32)
        full = None if norm is None else norm.float()
        PLAIN.rotate(q.float(), cos.float(), sin.float(), wide, full, 1e-5)
        fused.rotate(q.clone(), cos, sin, out, norm, 1e-5)
        close(out, wide)
