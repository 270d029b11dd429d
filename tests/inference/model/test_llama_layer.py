"""Our own layer against transformers' code: its states, its memory, and which families have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.inference.loading import prepare
from pipeline.inference.memory import LLAMA_FORM
from pipeline.inference.model.llama_layer import LlamaLayer
from pipeline.inference.proof import prove_layers, tree_error
from pipeline.inference.schedules import read_prefix
from pipeline.inference.schedules.forward import ReadPoint

MakeNetwork = Callable[..., Any]


def llama_layers(network: Any) -> list[LlamaLayer]:
    forwards = (vars(layer).get("forward") for layer in network.model.layers)
    return [forward for forward in forwards if isinstance(forward, LlamaLayer)]


@pytest.mark.parametrize("rows", [None, 1, 7])
@pytest.mark.parametrize("family", sorted(LLAMA_FORM - {"qwen3_vl_text"}))
def test_the_layer_gives_the_states_of_separate_prompts(
    family: str, rows: int | None, make_network: MakeNetwork
) -> None:
    model = prepare(make_network(family))
    layers = llama_layers(model.network)
    assert len(layers) == model.layers
    for layer in layers if rows else ():
        layer.block_rows, layer.feed_forward_rows = rows, rows + 1
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
    assert llama_layers(model.network) and tree_error(model) < 1e-5


@torch.inference_mode()
def test_without_the_tree_a_layer_has_the_bits_of_its_family(make_network: MakeNetwork) -> None:
    network, other = make_network("llama"), make_network("llama")
    prepare(network)
    ids = torch.arange(30).unsqueeze(0)
    network.set_attn_implementation("eager")
    other.set_attn_implementation("eager")
    assert torch.equal(network(input_ids=ids).logits, other(input_ids=ids).logits)


@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3_text", "phi3", "olmo2", "gpt_oss", "qwen3_moe", "lfm2"]
)
def test_other_families_run_whole_by_their_own_code(family: str, make_network: MakeNetwork) -> None:
    model = prepare(make_network(family))
    assert not llama_layers(model.network) and not model.cuts_last_layer
    assert tree_error(model) < 1e-4


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
    assert not llama_layers(model.network) and not model.cuts_last_layer
    assert tree_error(model) < 1e-5


@pytest.mark.parametrize("number_format", [torch.bfloat16, torch.float16])
def test_half_precision_differs_from_the_family_by_rounding(
    number_format: torch.dtype, make_network: MakeNetwork
) -> None:
    model = prepare(make_network("llama").to(number_format))
    assert len(llama_layers(model.network)) == model.layers
    # — two layers round some dozen times, each time by half of the last bit at most
    assert tree_error(model) < 12 * torch.finfo(number_format).eps


@torch.inference_mode()
def test_attention_in_bfloat16_leaves_the_states_in_float32(make_network: MakeNetwork) -> None:
    model = prepare(make_network("llama"))
    narrow = replace(model, attention_dtype=torch.bfloat16)
    assert 1e-5 < tree_error(narrow) < 4 * torch.finfo(torch.bfloat16).eps
    formats = set()
    for layer in model.network.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _mlp, args: formats.add(args[0].dtype))
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _o, args: formats.add(args[0].dtype)
        )
    read_prefix(narrow, [1, 2]).reader([ReadPoint(model.layers, ((3, 4),))]).read([[5, 6, 7]])
    assert formats == {torch.float32}
