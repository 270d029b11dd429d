from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from pipeline.inference.attention import kernels


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
