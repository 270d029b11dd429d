"""What tests need of the processor. Entry points: `needs_products` and `takes_int8`."""

from __future__ import annotations

import pytest
import torch

from pipeline.runtime.placement import processor_formats

HAS_PRODUCTS = any(
    torch.cpu.get_capabilities().get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8")
)
needs_products = pytest.mark.skipif(
    not HAS_PRODUCTS, reason="this processor has neither VNNI nor AMX"
)
takes_int8 = pytest.mark.skipif(
    "int8" not in processor_formats(), reason="a spec with int8 is refused on this processor"
)
