"""The prior about nothing equals what independent prompts give, worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import reference

from pipeline.inference.engine import LabelEngine, content_free_prior
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.model.loaded import LoadedModel

LABELS = {"yes": (7, 8), "no": (9,), "maybe": (11,)}
QUESTIONS = (
    Question("other", (3, 4, 5), {"a": (1,), "b": (2,)}),
    Question("task", (3, 6, 20, 21), LABELS),
)
DOCUMENTS = [[40, 41, 42], [50], []]  # the last is the empty text


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("prefix", [(), (30, 31, 32, 33)], ids=["bare", "opened"])
def test_the_prior_is_the_mean_of_what_each_prompt_gives_alone(
    family: str, prefix: tuple[int, ...], tiny_model: Callable[[str], LoadedModel]
) -> None:
    model = tiny_model(family)
    prior = [0.0, 0.0, 0.0]
    for document in DOCUMENTS:
        weights = [
            math.exp(
                reference.label_log_prob(model, prefix, document, QUESTIONS[1].token_ids, tokens)
            )
            for tokens in LABELS.values()
        ]
        prior = [
            share + weight / sum(weights) / len(DOCUMENTS)
            for share, weight in zip(prior, weights, strict=True)
        ]
    engine = LabelEngine(model, PromptTokens(prefix, QUESTIONS), max_batch_tokens=100)
    found = content_free_prior(engine, DOCUMENTS, "task")
    assert found.prior == pytest.approx(prior, abs=1e-4)
    assert sum(found.prior) == pytest.approx(1, abs=1e-12)
