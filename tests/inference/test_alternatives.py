"""What the bench compares with answers the same questions alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import reference
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.methods import expand, linear_weights, per_label, tree_flops
from pipeline.inference.alternatives import per_question
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.model.loaded import LoadedModel

TinyModel = Callable[[str], LoadedModel]
# gemma2 caps scores and gpt_oss has attention sinks, which transformers computes in one way alone
FAMILIES = ["llama", "qwen3", "gemma3_text", "gemma2", "gpt_oss", "qwen3_5_text", "lfm2"]


def some_prompt() -> PromptTokens:
    questions = (
        Question("a", (5, 6, 7, 8), {"x": [(1,)], "y": [(2,), (3,)]}),
        Question("b", (9,), {"x": [(4,)], "y": [(5,)], "z": [(6,)]}),
    )
    return PromptTokens((1, 2, 3), questions)


@pytest.mark.parametrize(
    "method",
    [expand, partial(expand, batch=2), per_question, per_label],
    ids=["expand", "expand 2", "per_question", "per_label"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_answers_as_the_reference_does(
    family: str, method: Callable[..., list[list[torch.Tensor]]], tiny_model: TinyModel
) -> None:
    model, prompt, source = tiny_model(family), some_prompt(), random.Random(family)
    documents = [source.choices(range(300), k=tokens) for tokens in (12, 40, 1)]
    for document, answers in zip(documents, method(model, prompt, documents), strict=True):
        for question, answer in zip(prompt.questions, answers, strict=True):
            expected = [
                reference.label_log_prob(model, prompt.prefix, document, question.token_ids, first)
                for first in question.first_tokens.values()
            ]
            torch.testing.assert_close(
                answer.double(), torch.tensor(expected).double(), rtol=0, atol=1e-4
            )


def test_products_outside_attention_are_those_torch_counts(
    tiny_model: TinyModel,
) -> None:
    model = tiny_model("llama")
    question = Question("q", (1, 2, 3), {"a": [(4,)], "b": [(5,)]})
    prompt = PromptTokens((), (question,))
    config = model.network.config
    heads, dim, layers = config.num_attention_heads, config.head_dim, config.num_hidden_layers
    attention = 4 * heads * dim * ((layers - 1) * (23 * 24 // 2) + 23)
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        for i, layer in enumerate(model.decoder.layers):  # type: ignore[arg-type]
            for module in (m for m in layer.modules() if isinstance(m, torch.nn.Linear)):
                module(torch.randn(1 if i == layers - 1 else 23, module.in_features))
        model.unembed(torch.randn(1, config.hidden_size))
    assert tree_flops(model, prompt, 20) == counted.get_total_flops() + attention


@pytest.mark.parametrize("family", ["lfm2", "qwen3_moe"])
def test_each_token_is_multiplied_with_linear_layers_and_its_own_experts(
    family: str, make_network: Callable[..., Any]
) -> None:
    layer = make_network(family).model.layers[0]
    linear = sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Linear))
    # — of each chosen expert three matrices of 48 x 32
    chosen = 2 * 3 * 48 * 32 if family == "qwen3_moe" else 0
    assert linear_weights(layer, experts_per_token=2) == linear + chosen
