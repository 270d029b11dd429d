"""Each answer is that of its own prompt: by each family, schedule and kernel, beside any others.

Random weights; the oracle is one full eager forward for every document, question and label.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

import numpy as np
import pytest
import reference
from fitted import bare_card

from pipeline.errors import ModelError
from pipeline.fitted.readout import LinearMap, Readout
from pipeline.inference.alternatives import answers_alone
from pipeline.inference.attention import hook
from pipeline.inference.attention.reference import attend_plainly
from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.labels.trie import Path
from pipeline.inference.memory import LLAMA_FORM
from pipeline.inference.model.loaded import LoadedModel

TinyModel = Callable[[str], LoadedModel]

FUSED = [
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "olmo2",
    "gpt_oss",
]  # fmt: skip
STAGED = [
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "lfm2", "lfm2_moe",
    "nemotron_h", "granitemoehybrid", "bamba", "falcon_h1",
]  # fmt: skip
HIDDEN = 48
SOURCE = random.Random(0)


def some_ids(tokens: int) -> Path:
    return tuple(SOURCE.choices(range(300), k=tokens))


LONG, ALIKE = some_ids(33), some_ids(9)
# Labels that share tokens, one with two texts.
WHOLE: list[set[Path]] = [{(4, 5)}, {(4, 6, 7), (9,)}, {(4, 6)}, {(8,)}]


def whole(name: str, ids: Path, *, beam: int | None = None, length_penalty: float = 0) -> Question:
    labels = {str(i): paths for i, paths in enumerate(WHOLE)}
    return Question(name, ids, labels, beam=beam, length_penalty=length_penalty)


def trained(name: str, ids: Path) -> Question:
    return Question(name, ids, dict.fromkeys(("l0", "l1", "l2"), ()))


FIRST = (
    Question("one_token", some_ids(1), {"two forms": [(1,), (2,)], "another": [(3,)]}),
    Question("long", LONG, {"a": [(7,)], "b": [(11,)], "c": [(12,)]}),
    Question("alike", (*ALIKE, *some_ids(2)), {"a": [(7,), (8,)], "b": [(11,)]}),
)
TOGETHER = (whole("whole", (*ALIKE, *some_ids(5))), whole("divided", LONG, length_penalty=0.7))
SEARCHED = (whole("searched", some_ids(4), beam=99),)  # as wide as the trie: exact
TRAINED = (
    trained("shallow", (*ALIKE, 1)),
    trained("deep", (*ALIKE, 1)),  # the same question at another layer
    trained("averaged", (30,)),
    trained("averaged_deep", (30,)),
)
# Questions, tokens of the prefix, and how often a document is read: once, if possible.
COMPANIES = {
    "first tokens": (FIRST, 1, 1),
    "at once": ((*FIRST, *TOGETHER, *TRAINED), 23, 1),
    "with a search": ((FIRST[0], *SEARCHED, *TOGETHER), 0, 1),
    "all kinds": ((TRAINED[0], *SEARCHED, *TRAINED[2:], *FIRST, *TOGETHER), 7, 2),
}


def tolerance(question: Question) -> float:
    """Sums in fp32 of a few thousand terms in another order, for each of a label's tokens.

    The contract allows 1e-4 for one token. States of a readout grow from layer to layer.
    """
    return 1e-4 if question in FIRST else 3e-4


def readouts_of(model: LoadedModel) -> dict[str, Readout]:
    def fitted(layer: int, pooling: Literal["last", "mean"]) -> Readout:
        weight = np.random.default_rng(layer).normal(size=(3, HIDDEN)) / np.sqrt(HIDDEN)
        linear = LinearMap(weight.astype(np.float32), np.arange(3, dtype=np.float32))
        return Readout(bare_card(3, pooling=pooling, layer=layer), {layer: linear})

    return {
        "shallow": fitted(1, "last"),
        "deep": fitted(model.layers, "last"),
        "averaged": fitted(1, "mean"),
        "averaged_deep": fitted(model.layers, "mean"),
    }


def expected_of(
    model: LoadedModel, prompt: PromptTokens, question: Question, document: Path
) -> np.ndarray:  # [labels]
    asked = (model, prompt.prefix, document, question.token_ids)
    if question.name in readouts_of(model):
        return reference.readout_log_probs(*asked, readouts_of(model)[question.name])
    if question in FIRST:
        first = question.first_tokens.values()
        return np.array([reference.label_log_prob(*asked, tokens) for tokens in first])
    power = question.trie.length_penalty
    of_labels = (
        [reference.verbalizer_log_prob(*asked, path) / len(path) ** power for path in own]
        for own in WHOLE
    )
    return np.array([np.logaddexp.reduce(own) for own in of_labels])


DOCUMENTS = [tuple(random.Random(n).choices(range(300), k=n)) for n in (1, 18, 70)]


def prompt_of(company: str) -> PromptTokens:
    questions, prefix, _ = COMPANIES[company]
    return PromptTokens(tuple(range(50, 50 + prefix)), questions)


@cache
def independent_answers(model: LoadedModel, company: str) -> list[list[np.ndarray]]:
    """By question and document: [labels]."""
    prompt = prompt_of(company)
    return [[expected_of(model, prompt, q, d) for d in DOCUMENTS] for q in prompt.questions]


def assert_as_independent(
    model: LoadedModel, company: str, expected: Sequence[Sequence[np.ndarray]]
) -> None:
    questions, _, readings = COMPANIES[company]
    prompt, documents = prompt_of(company), DOCUMENTS
    readouts = {q.name: readouts_of(model)[q.name] for q in questions if q in TRAINED}

    def check(actual: Sequence[np.ndarray], rows: Sequence[int], asked: Sequence[int]) -> None:
        for log_probs, number in zip(actual, asked, strict=True):
            for answer, row in zip(log_probs, rows, strict=True):
                np.testing.assert_allclose(
                    answer, expected[number][row], rtol=0, atol=tolerance(questions[number])
                )

    for max_batch_tokens in (1, 90, 10_000):
        engine = LabelEngine(model, prompt, max_batch_tokens=max_batch_tokens, readouts=readouts)
        labelled = engine.label(documents)
        check(labelled.log_probs, (0, 1, 2), range(len(questions)))
        assert labelled.usage.prefix_tokens_computed == readings * 89
    again = engine.label(documents).log_probs
    for log_probs, before in zip(again, labelled.log_probs, strict=True):
        np.testing.assert_array_equal(log_probs, before)
    some = [question.name for question in questions[::2]]
    check(engine.label(documents[:0:-1], tasks=some).log_probs, (2, 1), range(0, len(questions), 2))


# Each family with all that one reading answers; those with states with a short prefix and a search:
# one of each kind of state, and in `make test-slow` all.
EACH_STATE = {"qwen3_5_text", "lfm2", "bamba"}
CASES = [
    *((family, "at once") for family in (*FUSED, *STAGED)),
    *(
        pytest.param(family, other, marks=[] if family in EACH_STATE else pytest.mark.slow)
        for family in STAGED
        for other in ("first tokens", "with a search")
    ),
    *((family, "with a search") for family in ("llama", "gpt_oss")),
    *((family, "all kinds") for family in ("llama", "gpt_oss", "qwen3_5_text", "lfm2")),
]


@pytest.mark.parametrize(("family", "company"), CASES)
def test_each_answer_is_that_of_its_own_prompt(
    family: str, company: str, tiny_model: TinyModel
) -> None:
    model = tiny_model(family)
    assert model.schedule == ("fused" if family in FUSED else "staged")
    assert (model.llama is not None) == (family in LLAMA_FORM)  # others run by their own code
    assert_as_independent(model, company, independent_answers(model, company))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("way", ["the family's layers", "the plain kernel", "both"])
def test_no_way_to_run_a_forward_changes_an_answer(
    family: str, way: str, tiny_model: TinyModel
) -> None:
    model = tiny_model(family)
    kernel = model.kernel if way == "the family's layers" else attend_plainly
    llama = model.llama if way == "the plain kernel" else None
    variant = replace(model, llama=llama, kernel=kernel)
    assert_as_independent(variant, "at once", independent_answers(model, "at once"))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
def test_the_check_of_independent_prompts_agrees_with_the_oracle(
    family: str, tiny_model: TinyModel
) -> None:
    model, document = tiny_model(family), tuple(range(100, 120))
    prompt = PromptTokens((1, 2, 3), (*FIRST, *TOGETHER, *SEARCHED, *TRAINED))
    alone = answers_alone(model, prompt, document, readouts=readouts_of(model))
    for question, answers in zip(prompt.questions, alone, strict=True):
        expected = expected_of(model, prompt, question, document)
        np.testing.assert_allclose(answers, expected, rtol=0, atol=tolerance(question))


def test_the_oracle_never_enters_the_tree_and_leaves_the_model_ready_for_it(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = tiny_model("llama"), ((1, 2, 3), (4, 5), (6,))

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the oracle went through the tree")

    monkeypatch.setattr(hook.TreeAttention, "attend", never)
    reference.label_log_prob(model, *asked, (5,))
    reference.verbalizer_log_prob(model, *asked, (5, 6))
    reference.readout_log_probs(model, *asked, readouts_of(model)["averaged"])
    assert model.network.config._attn_implementation == hook.IMPLEMENTATION


def test_a_recurrence_that_cannot_be_continued_is_refused_by_name(tiny_model: TinyModel) -> None:
    # Jamba's scan over several tokens starts from nothing, whatever the cache holds.
    with pytest.raises(ModelError, match="model family 'jamba' gives other answers under the tree"):
        tiny_model("jamba")
