"""Layers of the Llama form against the family's own, and which layers keep their own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.inference.loading import prepare
from pipeline.inference.model.llama_form import (
    LlamaFormForward,
    RowBlocks,
    use_llama_form,
    use_row_blocks,
)
from pipeline.inference.proof import tree_error

MakeNetwork = Callable[..., Any]


def forwards(network: Any) -> list[LlamaFormForward]:
    own = (vars(layer).get("forward") for layer in network.model.layers)
    return [forward for forward in own if isinstance(forward, LlamaFormForward)]


@pytest.mark.parametrize("rows", [None, 1, 7])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_layers_of_the_llama_form_give_the_states_of_separate_prompts(
    family: str, rows: int | None, make_network: MakeNetwork
) -> None:
    model = prepare(make_network(family))
    if rows:
        use_row_blocks(model.decoder, rows=rows)
    assert len(forwards(model.network)) == model.layers
    # — transformers' own code without the tree is the oracle
    assert tree_error(model) < 1e-5


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
def test_layers_of_other_forms_keep_their_forward_and_take_blocks_of_rows(
    family: str, make_network: MakeNetwork
) -> None:
    model = prepare(make_network(family))
    assert not forwards(model.network)
    use_row_blocks(model.decoder, rows=7)
    forms = [vars(part).get("forward") for part in model.decoder.modules()]
    assert sum(isinstance(form, RowBlocks) for form in forms) == model.layers
    assert tree_error(model) < 1e-4


def scaled(layer: Any) -> None:
    class Scaled(type(layer)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(*args, **kwargs) * 1.001

    layer.__class__ = Scaled


def with_other_norm(layer: Any) -> None:
    norm = layer.post_attention_layernorm
    own = norm.forward
    norm.forward = lambda x: own(x) + x * 1e-3


def without_positions(layer: Any) -> None:
    attention = layer.self_attn
    own = attention.forward

    def forward(*, position_embeddings: tuple[Tensor, Tensor], **others: Any) -> Any:
        cos, sin = position_embeddings
        still = (torch.ones_like(cos), torch.zeros_like(sin))
        return own(position_embeddings=still, **others)

    attention.forward = forward


def with_window(layer: Any) -> None:
    layer.self_attn.sliding_window = 100


@pytest.mark.parametrize("change", [scaled, with_other_norm, without_positions, with_window])
def test_a_layer_that_computes_something_else_is_found_by_the_probe(
    change: Callable[[Any], None], make_network: MakeNetwork
) -> None:
    network = prepare(make_network("llama")).network
    for layer in network.model.layers:
        del layer.forward
    change(network.model.layers[1])
    use_llama_form(network.model)
    assert len(forwards(network)) == len(network.model.layers) - 1


def test_layers_in_half_precision_keep_their_forward(make_network: MakeNetwork) -> None:
    network = prepare(make_network("llama").bfloat16()).network
    assert not forwards(network)
