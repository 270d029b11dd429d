"""Families of transformers by name: the schedule each one takes, and that its answers are exact.

Random weights; the oracle is one full eager forward for every document, question and label.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import reference

from pipeline.errors import ModelError
from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.model.loaded import LoadedModel

TinyModel = Callable[[str], LoadedModel]

FUSED = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "gpt_oss",
]
STAGED = [
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "olmo_hybrid",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "granitemoehybrid",
    "bamba",
    "falcon_h1",
]
# fp32 sums of a few thousand terms in another order; the contract allows 1e-4.
TOLERANCE = 1e-4


def some_ids(source: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(source.randrange(300) for _ in range(tokens))


def some_prompt(source: random.Random, *, prefix: int) -> PromptTokens:
    """Questions from one token up, two of which begin alike."""
    asked = [some_ids(source, tokens) for tokens in (1, 5, 33, 17, 1)]
    asked.append((*asked[3][:9], *some_ids(source, 2)))
    questions = []
    for i, token_ids in enumerate(asked):
        first = source.sample(range(300), 4)
        labels = {"two forms": tuple(first[:2]), "another": (first[2],), "third": (first[3],)}
        questions.append(Question(f"task{i}", token_ids, labels))
    return PromptTokens(some_ids(source, prefix), tuple(questions))


def largest_difference(model: LoadedModel, prompt: PromptTokens, lengths: list[int]) -> float:
    """Of all label log-probabilities from the oracle's, over documents of those lengths."""
    source = random.Random("documents")
    documents = [some_ids(source, tokens) for tokens in lengths]
    labelled = LabelEngine(model, prompt, max_batch_tokens=300).label(documents)
    return max(
        abs(float(answers[row, label]) - expected)
        for answers, question in zip(labelled.log_probs, prompt.questions, strict=True)
        for row, document in enumerate(documents)
        for label, expected in enumerate(oracle(model, prompt, document, question))
    )


def oracle(
    model: LoadedModel, prompt: PromptTokens, document: tuple[int, ...], question: Question
) -> list[float]:
    return [
        reference.label_log_prob(model, prompt.prefix, document, question.token_ids, first_tokens)
        for first_tokens in question.labels.values()
    ]


@pytest.mark.parametrize("prefix", [0, 1, 23])
@pytest.mark.parametrize(
    "family, schedule",
    [*((family, "fused") for family in FUSED), *((family, "staged") for family in STAGED)],
)
def test_a_family_takes_its_schedule_and_answers_as_independent_prompts_do(
    family: str, schedule: str, prefix: int, tiny_model: TinyModel
) -> None:
    model = tiny_model(family)
    assert model.schedule == schedule
    prompt = some_prompt(random.Random(f"{family} {prefix}"), prefix=prefix)
    assert largest_difference(model, prompt, [1, 2, 18, 70]) <= TOLERANCE


@pytest.mark.parametrize("family", STAGED)
def test_labelling_again_gives_the_same_answers(family: str, tiny_model: TinyModel) -> None:
    source = random.Random(family)
    engine = LabelEngine(tiny_model(family), some_prompt(source, prefix=7), max_batch_tokens=300)
    documents = [some_ids(source, tokens) for tokens in (30, 1, 12)]
    first, again = engine.label(documents), engine.label(documents)
    for before, after in zip(first.log_probs, again.log_probs, strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("family", STAGED)
def test_another_question_changes_no_answer(family: str, tiny_model: TinyModel) -> None:
    source = random.Random(family)
    prompt = some_prompt(source, prefix=7)
    engine = LabelEngine(tiny_model(family), prompt, max_batch_tokens=300)
    documents = [some_ids(source, tokens) for tokens in (30, 1, 12)]
    whole = engine.label(documents).log_probs
    for i, question in enumerate(prompt.questions):
        alone = engine.label(documents, tasks=[question.name]).log_probs[0]
        np.testing.assert_allclose(alone, whole[i], rtol=0, atol=TOLERANCE)


def test_a_recurrence_that_cannot_be_continued_is_refused_by_name(tiny_model: TinyModel) -> None:
    # Jamba's scan over several tokens starts from nothing, whatever the cache holds.
    with pytest.raises(ModelError, match="model family 'jamba' gives other answers under the tree"):
        tiny_model("jamba")
