"""Linear layers take the library that is fastest, and their answers move by rounding alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.inference.loading import prepare
from pipeline.inference.model import products
from pipeline.inference.model.products import LIBRARIES, use_fastest_library
from pipeline.inference.proof import tree_error

MakeNetwork = Callable[..., Any]
needs_onednn = pytest.mark.skipif("oneDNN" not in LIBRARIES, reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def of_a_new_process() -> Iterator[None]:
    """The choice is made once a process: here, once a test."""
    products._fastest_library.cache_clear()
    yield
    products._fastest_library.cache_clear()


def slowed(product: products.Product) -> products.Product:
    def slow(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        time.sleep(0.02)
        return product(x, weight, bias)

    return slow


@needs_onednn
@pytest.mark.parametrize("fast, slow", [("torch", "oneDNN"), ("oneDNN", "torch")])
def test_the_faster_library_is_taken_whichever_it_is(
    fast: str, slow: str, make_network: MakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = make_network("llama", attention_bias=True)
    monkeypatch.setitem(LIBRARIES, slow, slowed(LIBRARIES[slow]))
    assert use_fastest_library(network) == fast
    patched = [layer for layer in network.modules() if "forward" in vars(layer)]
    linear = [layer for layer in network.modules() if type(layer) is nn.Linear]
    assert patched == (linear if fast == "oneDNN" else [])
    assert tree_error(prepare(network)) < 1e-5


@needs_onednn
def test_a_model_that_is_loaded_twice_takes_one_library(
    make_network: MakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = use_fastest_library(make_network("llama"))
    monkeypatch.setitem(LIBRARIES, first, slowed(LIBRARIES[first]))
    assert use_fastest_library(make_network("llama")) == first


@needs_onednn
@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 40), (7, 40), (1, 5, 40), (2, 5, 40), (0, 40)])
def test_the_libraries_differ_by_the_order_of_additions(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = nn.Linear(40, 24, bias=bias), torch.randn(shape)
    outputs = [library(x, layer.weight, layer.bias) for library in LIBRARIES.values()]
    sums = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    for output in outputs:
        assert output.shape == (*shape[:-1], 24)
        # — 40 additions of numbers below 4, each rounded by at most half of the last bit
        torch.testing.assert_close(output.double(), sums, rtol=0, atol=40 * 4 * 2**-24)


@pytest.mark.parametrize("number_format", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_torchs_own_product(
    number_format: torch.dtype, make_network: MakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIBRARIES, "torch", slowed(LIBRARIES["torch"]))
    assert use_fastest_library(make_network("llama").to(number_format)) == "torch"
