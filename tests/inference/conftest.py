from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Toys are too small to share out: more threads only wait for each other."""
    torch.set_num_threads(1)
