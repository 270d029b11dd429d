"""What tests need of the processor. Entry point: `needs_products`."""

from __future__ import annotations

import pytest
import torch

HAS_PRODUCTS = any(
    torch.cpu.get_capabilities().get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8")
)
needs_products = pytest.mark.skipif(
    not HAS_PRODUCTS, reason="this processor has neither VNNI nor AMX"
)
