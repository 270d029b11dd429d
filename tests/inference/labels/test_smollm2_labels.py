"""Whole labels with real weights and a real tokenizer: Chinese ones, and a large taxonomy."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import reference

from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, tokenise_prompt
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.inference.loading import convert_gguf, load_model, load_tokenizer
from pipeline.inference.model.loaded import LoadedModel
from pipeline.spec.schema import PromptSpec
from pipeline.spec.tasks import TaskSpec

pytestmark = pytest.mark.slow
# fp32 sums of a few thousand terms in another order, for each of a label's tokens.
TOLERANCE = 1e-4
TEXTS = [
    "央行今日宣布下调存款准备金率。",
    "The council extended the bus line. " * 8,
]
TOPICS = ["财经", "政治", "娱乐", "体育", "军事", "科技", "农业民生", "能源", "汽车"]
TOPICS += ["创新设计", "环境", "其它"]
WORDS = [
    ["Science", "Arts", "Business", "Society", "Health", "Sports", "Nature", "History"],
    ["Physics", "Biology", "Music", "Finance", "Law", "Medicine", "Software", "Football"],
    ["Optics", "Genetics", "Opera", "Banking", "Patents", "Surgery", "Compilers", "Leagues"],
    ["Old", "New", "Local", "Abroad"],
]
TAXONOMY = ["/".join(words) for words in product(*WORDS)]


@pytest.fixture(scope="module")
def folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("smollm2")
    convert_gguf(smollm2_gguf, made)
    return made


def asked(folder: Path, **task: object) -> tuple[LoadedModel, PromptTokens, list[list[int]]]:
    tokenizer = load_tokenizer(folder)
    spec = TaskSpec.model_validate({"name": "topic", "question": "Which topic?", **task})
    encoder = DocumentTokenizer(tokenizer)
    return (
        load_model(folder, dtype="float32", device="cpu"),
        tokenise_prompt(tokenizer, PromptSpec(), [spec]),
        [encoder.encode(text) for text in TEXTS],
    )


def test_chinese_labels_have_their_independent_prompts_log_probabilities(folder: Path) -> None:
    model, prompt, documents = asked(folder, labels=TOPICS)
    (question,) = prompt.questions
    assert question.trie is not None
    (found,) = LabelEngine(model, prompt, max_batch_tokens=1_280).label(documents).log_probs
    for row, document in enumerate(documents):
        for column, [path] in enumerate(question.trie.verbalizers):
            oracle = reference.verbalizer_log_prob(
                model, prompt.prefix, document, question.token_ids, path
            )
            assert found[row, column] == pytest.approx(oracle, abs=TOLERANCE * len(path))


def test_the_best_of_two_thousand_paths_have_their_own_log_probabilities(folder: Path) -> None:
    labels = random.Random(0).sample(TAXONOMY, 2_000)
    model, prompt, documents = asked(folder, labels=labels, beam=8, top_k=10, separator="/")
    (question,) = prompt.questions
    labelled = LabelEngine(model, prompt, max_batch_tokens=1_280).label(documents[:1])
    (found,) = labelled.log_probs[0]
    assert question.trie is not None
    for label in np.argsort(-found)[:4]:
        [path] = question.trie.verbalizers[label]
        oracle = reference.verbalizer_log_prob(
            model, prompt.prefix, documents[0], question.token_ids, path
        )
        assert found[label] == pytest.approx(oracle, abs=TOLERANCE * len(path))
    # a handful of forwards, each with little more than the paths of the beam
    assert labelled.usage.question_tokens_computed < 1_000
