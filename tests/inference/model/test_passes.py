"""Compiled passes are used where they are right, and the plain ones elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pipeline.inference.model.passes import PLAIN, passes


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What one test has compiled is not what the next one gets."""
    passes.cache_clear()
    yield
    passes.cache_clear()
    torch._dynamo.reset()


Compile = Callable[..., Any]


def as_it_is(function: Any, *, dynamic: bool) -> Any:
    assert dynamic  # every batch has another number of rows
    return lambda *args: function(*args)


def without_a_compiler(function: Any, *, dynamic: bool) -> Any:
    def fail(*_args: object) -> None:
        raise RuntimeError("Cannot find a working triton installation")

    return fail


def four_steps_off(function: Any, *, dynamic: bool) -> Any:
    """Of three functions, the gate is wrong by 4 of bfloat16's steps of 1/128; 2 are allowed."""
    return (lambda *args: function(*args) * (1 + 1 / 32)) if function is PLAIN.gate else function


@pytest.mark.parametrize(
    ("compiler", "used"), [(as_it_is, True), (without_a_compiler, False), (four_steps_off, False)]
)
def test_compiled_passes_are_used_only_if_they_are_right(
    compiler: Compile, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", compiler)
    assert passes("cpu", torch.bfloat16) is PLAIN
    assert (passes("cpu", torch.bfloat16, compiled_on="cpu") is not PLAIN) == used


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_compiles_them(dtype: torch.dtype) -> None:
    """On a CPU, to C++: a GPU has the same graph, and another compiler below it."""
    assert passes("cpu", dtype, compiled_on="cpu") is not PLAIN
