"""Linear layers take the library that is fast for them, and answers move by rounding alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.inference.model import linear
from pipeline.inference.model.linear import FusedProducts, Products, is_onednn_faster, use_onednn

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch without oneDNN"
)


@needs_onednn
@pytest.mark.parametrize(
    "device, dtype, features, faster",
    [
        ("cpu", torch.float32, {"avx512_f": True}, True),
        ("cpu", torch.float32, {"avx2": True}, False),
        ("cpu", torch.float16, {"avx512_f": True}, False),
        ("cuda", torch.float32, {"avx512_f": True}, False),
    ],
)
def test_the_processors_instructions_decide_which_library_is_used(
    device: str,
    dtype: torch.dtype,
    features: dict[str, bool],
    faster: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert is_onednn_faster.__wrapped__(device, dtype) == faster


@needs_onednn
@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 40), (7, 40), (2, 5, 40), (0, 40)])
def test_the_libraries_differ_by_the_order_of_additions(
    shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = nn.Linear(40, 24, bias=bias), torch.randn(shape)
    sums = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    by_torch = layer(x)
    monkeypatch.setattr(linear, "is_onednn_faster", lambda *_: True)
    assert use_onednn(layer) == "oneDNN" and "forward" in vars(layer)
    for output in (by_torch, layer(x)):
        # — 40 additions of numbers below 4, each rounded by at most half of the last bit
        torch.testing.assert_close(output.double(), sums, rtol=0, atol=40 * 4 * 2**-24)


@needs_onednn
@torch.inference_mode()
@pytest.mark.parametrize("kind", [Products, FusedProducts])
@pytest.mark.parametrize("bias", [True, False])
def test_what_follows_a_product_is_as_it_is_defined(kind: type[Products], bias: bool) -> None:
    gate, up = (nn.Linear(40, 24, bias=bias) for _ in range(2))
    x, states = torch.randn(7, 40), torch.randn(7, 24)
    expected = states + gate(x)
    torch.testing.assert_close(kind(gate).added_to(states, x), expected, rtol=0, atol=1e-5)
    expected = nn.functional.silu(gate(x)) * up(x)
    torch.testing.assert_close(FusedProducts(gate, up).gated(x), expected, rtol=0, atol=1e-5)
