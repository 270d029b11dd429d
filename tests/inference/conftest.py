from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_oracle import NATIVE
from torch import Tensor

from pipeline.inference.attention import kernels
from pipeline.inference.processor import native


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Toys are too small to share out: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(params=[NATIVE, "torch's"])
def read_by_kernel(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Tensor, Tensor]]:
    """The keys and values that reach the kernel, as they reach it: [..., keys, dim]."""
    reached: list[tuple[Tensor, Tensor]] = []
    natively, by_torch = native.attend_into, kernels._flash_cpu

    def watched_native(*tensors: Tensor, **options: Any) -> None:
        reached.append((tensors[3].transpose(1, 2), tensors[4].transpose(1, 2)))
        natively(*tensors, **options)

    def watched(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        reached.append((k, v))
        return by_torch(q, k, v, *rest)

    is_native = request.param == "native"
    monkeypatch.setattr(kernels, "is_native", lambda _dtype, _dim: is_native)
    monkeypatch.setattr(native, "attend_into", watched_native)
    monkeypatch.setattr(kernels, "_flash_cpu", watched)
    return reached
