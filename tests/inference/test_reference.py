"""The oracle reads one full forward's logits, and nothing of the tree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference import label_log_prob

from pipeline.inference.attention import hook as layers
from pipeline.inference.attention.hook import IMPLEMENTATION
from pipeline.inference.model.loaded import LoadedModel, plain_attention

TinyModel = Callable[[str], LoadedModel]
PREFIX, DOCUMENT, QUESTION = (1, 2, 3), tuple(range(40, 75)), (7, 8)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("first_tokens", [(5,), (5, 90, 299)])
def test_the_oracle_is_a_log_softmax_of_the_last_logits(
    family: str, first_tokens: tuple[int, ...], tiny_model: TinyModel
) -> None:
    model = tiny_model(family)
    prompt = torch.tensor([[*PREFIX, *DOCUMENT, *QUESTION]])
    with plain_attention(model.network, "sdpa"), torch.inference_mode():
        logits = model.network(input_ids=prompt).logits[0, -1].double()
    expected = float(logits.log_softmax(-1)[list(first_tokens)].exp().sum().log())
    assert label_log_prob(model, PREFIX, DOCUMENT, QUESTION, first_tokens) == pytest.approx(
        # sdpa and eager sum in another order; logits here are below 50 in size.
        expected,
        abs=8 * 50 * torch.finfo(torch.float32).eps,
    )


def test_the_oracle_never_enters_the_tree_and_leaves_the_model_ready_for_it(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the oracle went through the tree")

    monkeypatch.setattr(layers, "attend_tree", never)
    label_log_prob(model, PREFIX, DOCUMENT, QUESTION, (5,))
    assert model.network.config._attn_implementation == IMPLEMENTATION


def test_all_first_tokens_together_are_certain(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    certain = label_log_prob(model, PREFIX, DOCUMENT, QUESTION, range(300))
    assert certain == pytest.approx(0.0, abs=300 * torch.finfo(torch.float32).eps)
