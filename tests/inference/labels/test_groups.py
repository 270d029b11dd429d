"""Questions of every kind in one call answer as plain forwards of their own prompts do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
from fitted import bare_card

from pipeline.fitted.readout import LinearMap, Readout
from pipeline.inference.alternatives import answers_alone
from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.labels.trie import LabelTrie, Path
from pipeline.inference.model.loaded import LoadedModel

TinyModel = Callable[[str], LoadedModel]
# fp32 sums of a few thousand terms in another order, of labels of several tokens.
TOLERANCE = 5e-4
PREFIX, HIDDEN = (1, 2, 3), 48
SHARED: list[set[Path]] = [{(4, 5)}, {(4, 6, 7), (9,)}, {(4, 6)}, {(8,)}]


def fitted(layer: int, pooling: Literal["last", "mean"]) -> Readout:
    source = np.random.default_rng(layer)
    weight = (source.normal(size=(3, HIDDEN)) / np.sqrt(HIDDEN)).astype(np.float32)
    card = bare_card(3, pooling=pooling, layer=layer)
    return Readout(card, {layer: LinearMap(weight, np.zeros(3, np.float32))})


READOUTS = {"shallow": fitted(1, "last"), "deep": fitted(2, "last"), "averaged": fitted(2, "mean")}


def plain(name: str, ids: Path, labels: list[set[Path]] | None, beam: int | None) -> Question:
    if labels is None:
        return Question(name, ids, {"a": (11, 12), "b": (13,)})
    first = {str(i): tuple(sorted({p[0] for p in paths})) for i, paths in enumerate(labels)}
    return Question(name, ids, first, LabelTrie.of(labels), beam)


def trained(name: str, ids: Path) -> Question:
    return Question(name, ids, dict.fromkeys(("l0", "l1", "l2"), ()))


FIRST = plain("first", (20, 21), None, None)
WHOLE = plain("whole", (20, 22, 23), SHARED, None)
SEARCHED = plain("searched", (24, 25), SHARED, 99)  # as wide as the trie: exact
TRAINED = (trained("shallow", (20, 22, 23)), trained("deep", (30,)), trained("averaged", (30,)))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
@pytest.mark.parametrize(
    "questions, readings",
    [
        ((FIRST, WHOLE, *TRAINED), 1),
        ((TRAINED[0], WHOLE), 1),
        ((TRAINED[0], SEARCHED, FIRST, TRAINED[2], WHOLE), 2),
        ((SEARCHED, TRAINED[1]), 2),
    ],
    ids=["at once", "whole and trained", "all kinds", "searched and trained"],
)
def test_each_kind_answers_in_any_company_as_its_own_prompts_do(
    family: str, questions: tuple[Question, ...], readings: int, tiny_model: TinyModel
) -> None:
    model, source = tiny_model(family), random.Random(family)
    prompt = PromptTokens(PREFIX, questions)
    documents = [[source.randrange(200) for _ in range(tokens)] for tokens in (1, 30, 7)]
    readouts = {q.name: READOUTS[q.name] for q in questions if q.name in READOUTS}
    for budget in (1, 70, 10_000):
        engine = LabelEngine(model, prompt, max_batch_tokens=budget, readouts=readouts)
        labelled = engine.label(documents)  # fails if more is read than it says
        for row, document in enumerate(documents):
            alone = answers_alone(model, prompt, document, readouts=readouts)
            for found, expected in zip(labelled.log_probs, alone, strict=True):
                np.testing.assert_allclose(found[row], expected, rtol=0, atol=TOLERANCE)
        of_prefix = len(documents) if model.schedule == "staged" else 0  # its last token
        assert labelled.usage.prefix_tokens_computed == readings * (38 + of_prefix)


def test_a_whole_label_reads_fewer_tokens_than_a_prompt_for_each_of_its_texts(
    tiny_model: TinyModel,
) -> None:
    model, document = tiny_model("llama"), [7] * 10
    prompt = PromptTokens(PREFIX, (TRAINED[0], WHOLE))
    engine = LabelEngine(
        model, prompt, max_batch_tokens=99, readouts={"shallow": READOUTS["shallow"]}
    )
    usage = engine.label([document]).usage
    # — one prompt for each of the 5 verbalizers but its last token
    of_forms = [3 + len(path) - 1 for paths in SHARED for path in paths]
    assert usage.prefix_tokens_computed == 10
    assert usage.question_tokens_computed < sum(of_forms)
