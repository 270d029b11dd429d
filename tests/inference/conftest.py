from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.inference.attention import kernels


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Toys are too small to share out: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture
def read_by_kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """The keys and values that reach the kernel, as they reach it."""
    reached: list[tuple[Tensor, Tensor]] = []
    real = kernels._flash_cpu

    def watched(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        reached.append((k, v))
        return real(q, k, v, *rest)

    monkeypatch.setattr(kernels, "_flash_cpu", watched)
    return reached
