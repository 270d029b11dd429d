"""Our own layer against transformers' code: its states, its memory, and which families have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.inference.loading import prepare
from pipeline.inference.memory import LLAMA_FORM
from pipeline.inference.model import linear, llama, operations
from pipeline.inference.model.operations import Operations
from pipeline.inference.processor import native
from pipeline.inference.proof import prove_layers, tree_error

MakeNetwork = Callable[..., Any]


@pytest.mark.parametrize(
    "of", [operations.PLAIN, *operations.operations_for(torch.device("cpu"), torch.float32)]
)
@pytest.mark.parametrize("rows", [None, 1, 7])
@pytest.mark.parametrize("family", sorted(LLAMA_FORM - {"qwen3_vl_text"}))
def test_the_decoder_gives_the_states_of_separate_prompts(
    family: str, rows: int | None, of: Operations, make_network: MakeNetwork
) -> None:
    model = prepare(make_network(family))
    assert model.llama is not None
    decoder = llama.LlamaDecoder(model.decoder, of)
    for layer in decoder._layers if rows else ():
        layer._block_rows, layer._inner_rows = rows, rows + 1
    model = replace(model, llama=decoder)
    # — transformers' own code without the tree is the oracle
    assert tree_error(model) < 1e-5
    prove_layers(model, range(1, model.layers + 1))


@pytest.mark.parametrize("settings", [{"attention_bias": True, "mlp_bias": True}, {"head_dim": 10}])
def test_biases_and_wide_heads_are_those_of_the_family(
    settings: dict[str, Any], make_network: MakeNetwork
) -> None:
    network = make_network("llama", **settings)
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    model = prepare(network)
    assert model.llama is not None and tree_error(model) < 1e-5


def test_a_model_that_calls_itself_llama_and_computes_something_else_runs_whole(
    make_network: MakeNetwork,
) -> None:
    network = make_network("llama")
    layer = network.model.layers[0]

    class Scaled(type(layer)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(*args, **kwargs) * 1.1

    layer.__class__ = Scaled
    model = prepare(network)
    assert model.llama is None
    assert tree_error(model) < 1e-5


@pytest.mark.skipif(not native.computes(torch.bfloat16), reason="no products of bfloat16")
def test_attention_in_bfloat16_leaves_the_states_in_float32(make_network: MakeNetwork) -> None:
    kernel = partial(native.attend_natively, computed=torch.bfloat16)
    narrow = replace(prepare(make_network("llama")), kernel=kernel)
    assert 1e-5 < tree_error(narrow) < 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_products_that_compute_what_follows_them_give_the_same_states(
    family: str, make_network: MakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepare(make_network(family))
    monkeypatch.setattr(linear, "is_onednn_faster", lambda *_: True)
    assert linear.use_onednn(model.network) == "oneDNN"
    model = replace(model, llama=llama.LlamaDecoder(model.decoder, operations.PLAIN))
    assert tree_error(model) < 1e-5
