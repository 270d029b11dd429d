"""Whole labels have the log-probabilities of independent prompts, one a verbalizer."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import reference
import torch
from dense_oracle import attend_run_by_run
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from pipeline.errors import SpecError
from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question, tokenise_prompt
from pipeline.inference.labels.scoring import LabelScorer
from pipeline.inference.labels.trie import LabelTrie
from pipeline.inference.model.loaded import LoadedModel
from pipeline.spec.schema import PromptSpec
from pipeline.spec.tasks import TaskSpec

TinyModel = Callable[[str], LoadedModel]
FAMILIES = ["llama", "gemma3_text", "qwen3_5_text"]  # fused, with windows, staged
# fp32 sums of a few thousand terms in another order, as for first tokens, a token.
TOLERANCE = 1e-4

TOPICS = [
    "财经",
    "政治",
    "娱乐",
    "体育",
    "军事",
    "科技",
    "农业民生",
    "能源",
    "汽车",
    "创新设计",
    "环境",
    "其它",
]
COUNTRIES = ["英国", "中国", "法国", "日本", "美国", "印度"]
ANSWERS = {"是": ("是", "是的", "对"), "否": ("否", "不")}


def task(name: str, labels: object, **more: object) -> TaskSpec:
    return TaskSpec.model_validate({"name": name, "question": f"{name}?", "labels": labels, **more})


def oracle(
    model: LoadedModel,
    prompt: PromptTokens,
    question: Question,
    paths: Sequence[tuple[int, ...]],
    document: Sequence[int],
) -> list[float]:
    asked = (prompt.prefix, document, question.token_ids)
    return [reference.verbalizer_log_prob(model, *asked, path) for path in paths]


def by_label(trie: LabelTrie, sums: Sequence[float]) -> np.ndarray:
    found = [
        [s for s, (_, owner) in zip(sums, trie.ends, strict=True) if owner == label]
        for label in range(trie.labels)
    ]
    return np.array([np.logaddexp.reduce(of_label) for of_label in found])


def assert_as_independent(
    model: LoadedModel, prompt: PromptTokens, documents: Sequence[list[int]]
) -> None:
    labelled = LabelEngine(model, prompt, max_batch_tokens=400).label(documents)
    for question, answers in zip(prompt.questions, labelled.log_probs, strict=True):
        if question.trie is None:
            continue
        paths = [question.trie.path(end) for end, _ in question.trie.ends]
        tolerance = TOLERANCE * max(map(len, paths))
        for row, document in enumerate(documents):
            expected = by_label(question.trie, oracle(model, prompt, question, paths, document))
            np.testing.assert_allclose(answers[row], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_chinese_labels_of_many_bytes_equal_independent_prompts(
    family: str, tiny_model: TinyModel, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    tasks = [
        task("topic", TOPICS),
        task("art", ["art", "law", "sport"]),  # differ at once: first tokens
        task("country", COUNTRIES),
        task("good", ANSWERS),
    ]
    prompt = tokenise_prompt(byte_tokenizer, PromptSpec(), tasks)
    assert [q.trie is not None for q in prompt.questions] == [True, False, True, True]
    source = random.Random(family)
    documents = [[source.randrange(256) for _ in range(tokens)] for tokens in (1, 30)]
    assert_as_independent(tiny_model(family), prompt, documents)


@pytest.mark.parametrize("family", FAMILIES)
def test_first_tokens_are_read_alike_beside_whole_labels_and_alone(
    family: str, tiny_model: TinyModel, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = tiny_model(family)
    tasks = [task("topic", TOPICS[:4]), task("art", ["art", "law", "sport"])]
    prompt = tokenise_prompt(byte_tokenizer, PromptSpec(), tasks)
    (_, beside) = LabelEngine(model, prompt, max_batch_tokens=99).label([[7] * 20]).log_probs
    art = prompt.questions[1]
    expected = [
        reference.label_log_prob(model, prompt.prefix, [7] * 20, art.token_ids, first)
        for first in art.labels.values()
    ]
    np.testing.assert_allclose(beside[0], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("cut", [True, False])
def test_whole_labels_compiled_for_a_fused_kernel_equal_independent_prompts(
    family: str, cut: bool, tiny_model: TinyModel, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = replace(tiny_model(family), kernel=attend_run_by_run)
    tasks = [task("country", COUNTRIES), task("mood", ["very good", "very bad", "verily"])]
    prompt = tokenise_prompt(byte_tokenizer, PromptSpec(), tasks)
    searched = replace(prompt.questions[0], name="searched", beam=99)
    prompt = replace(prompt, questions=prompt.questions if cut else (*prompt.questions, searched))
    model = replace(model, cuts_last_layer=cut)
    assert_as_independent(model, prompt, [[7] * 20, [8, 9]])


@pytest.mark.parametrize("scoring", ["auto", "full"])
def test_labels_that_differ_at_once_are_scored_in_full_where_that_is_asked_for(
    scoring: str, tiny_model: TinyModel, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    labels = task("art", ["art", "law", "sport"], scoring=scoring)
    prompt = tokenise_prompt(byte_tokenizer, PromptSpec(), [labels])
    assert (prompt.questions[0].trie is not None) == (scoring == "full")
    assert_as_independent(tiny_model("llama"), prompt, [[5, 6, 7]])


def test_first_token_refuses_labels_that_begin_alike(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tasks = [task("country", COUNTRIES, scoring="first_token")]
    with pytest.raises(SpecError, match=r"tasks.0.labels: labels \[.*\] of 'country' begin with"):
        tokenise_prompt(byte_tokenizer, PromptSpec(), tasks)


def test_labels_of_the_same_tokens_are_refused(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    folding = copy.deepcopy(byte_tokenizer)
    folding.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(SpecError, match="are the same tokens 'usa'; give them texts that"):
        tokenise_prompt(folding, PromptSpec(), [task("t", ["USA", "usa", "us"])])


def some_labels(source: random.Random, labels: int) -> list[set[tuple[int, ...]]]:
    """Labels of one to three verbalizers of one to five tokens, which begin alike."""
    paths: set[tuple[int, ...]] = set()
    while len(paths) < 2 * labels:
        paths.add(tuple(source.choices(range(4), k=source.randint(1, 5))))
    forms: list[set[tuple[int, ...]]] = [set() for _ in range(labels)]
    for i, path in enumerate(sorted(paths, key=lambda path: source.random())):
        forms[i % labels].add(path)
    return forms


@pytest.mark.parametrize("seed", range(20))
def test_a_trie_holds_every_verbalizer_once(seed: int) -> None:
    labels = some_labels(random.Random(seed), 9)
    trie = LabelTrie.of(labels)
    found: list[set[tuple[int, ...]]] = [set() for _ in labels]
    for end, label in trie.ends:
        found[label].add(trie.path(end))
    for forms, kept in zip(labels, found, strict=True):
        assert kept <= forms
        # what is left out goes on from what is kept
        assert all(any(path[: len(k)] == k for k in kept) for path in forms)
        assert not any(a != b and a[: len(b)] == b for a in kept for b in kept)
    prefixes = {path[:n] for forms in found for path in forms for n in range(len(path) + 1)}
    assert {trie.path(node) for node in range(len(trie.token_ids))} == prefixes
    assert len(trie.token_ids) == len(prefixes)
    for node in range(len(trie.token_ids)):
        below = {trie.path(child) for child in trie.children(node)}
        assert below == {p for p in prefixes if p[:-1] == trie.path(node) and p}
        assert (node in trie.inner) == bool(below)


@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_a_length_penalty_divides_each_verbalizers_sum(
    penalty: float, tiny_model: TinyModel
) -> None:
    model, source = tiny_model("llama"), random.Random(3)
    labels = some_labels(source, 6)
    trie = LabelTrie.of(labels, length_penalty=penalty)
    question = Question("q", (8, 9), {str(i): (0,) for i in range(6)}, trie)
    prompt = PromptTokens((1, 2), (question,))
    paths = [trie.path(end) for end, _ in trie.ends]
    sums = oracle(model, prompt, question, paths, [4, 5])
    scores = [s / len(path) ** penalty for s, path in zip(sums, paths, strict=True)]
    (found,) = LabelEngine(model, prompt, max_batch_tokens=400).label([[4, 5]]).log_probs
    np.testing.assert_allclose(found[0], by_label(trie, scores), rtol=0, atol=5 * TOLERANCE)


def test_the_probability_of_a_labels_beginning_counts_what_goes_on_from_it(
    tiny_model: TinyModel,
) -> None:
    """All tokens behind `1` together are as likely as `1` itself."""
    model = tiny_model("llama")
    trie = LabelTrie.of([[(1,)], *([(1, token)] for token in range(300))])
    question = Question("q", (8, 9), {str(i): (1,) for i in range(301)}, trie)
    prompt = PromptTokens((1, 2), (question,))
    (found,) = LabelEngine(model, prompt, max_batch_tokens=400).label([[4, 5]]).log_probs
    assert np.logaddexp.reduce(found[0, 1:]) == pytest.approx(found[0, 0], abs=TOLERANCE)


@pytest.mark.parametrize("docs", [1, 3, 200])
def test_any_number_of_documents_and_nodes_is_read_in_parts(docs: int) -> None:
    trie = LabelTrie.of(some_labels(random.Random(docs), 90))
    source = torch.Generator().manual_seed(docs)
    hidden = torch.randn(len(trie.inner), docs, 8, generator=source)
    weights = torch.randn(8, 11, generator=source)
    rows: list[int] = []

    def unembed(states: torch.Tensor) -> torch.Tensor:
        rows.append(len(states))
        return states @ weights

    (found,) = LabelScorer([trie], torch.device("cpu")).log_probs(hidden, unembed)
    log_softmax = (hidden.double() @ weights.double()).log_softmax(-1)  # [nodes, docs, vocab]
    place = {node: i for i, node in enumerate(trie.inner)}
    for doc in {0, docs - 1}:
        sums = [
            sum(
                float(log_softmax[place[trie.parents[node]], doc, trie.token_ids[node]])
                for node in trie.nodes_to(end)
            )
            for end, _ in trie.ends
        ]
        np.testing.assert_allclose(found[doc], by_label(trie, sums), rtol=0, atol=1e-4)
    assert max(rows) <= 128


def test_the_longest_label_counts_in_what_a_context_leaves(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    short = tokenise_prompt(byte_tokenizer, PromptSpec(), [task("t", ["ab", "ac"])])
    long = tokenise_prompt(byte_tokenizer, PromptSpec(), [task("t", ["ab", "ac" + "d" * 7])])
    assert short.room(1_000) - long.room(1_000) == 7


def test_usage_counts_a_trie_once(
    tiny_model: TinyModel,
) -> None:
    trie = LabelTrie.of([[(1, 2, 3, 4, 5)], [(1, 2, 3, 4, 6, 7)]])
    question = Question("q", (8, 9, 10, 11), {"a": (1,), "b": (1,)}, trie)
    prompt = PromptTokens((1,) * 10, (question,))
    usage = LabelEngine(tiny_model("llama"), prompt, max_batch_tokens=99).label([[1] * 50]).usage
    assert (usage.prefix_tokens_computed, usage.question_tokens_computed) == (50, 4 + 4 + 1)


@pytest.mark.parametrize("scoring", ["auto", "full"])
def test_a_label_that_begins_another_is_refused_by_name(
    scoring: str, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    labels = {"C": ["C"], "C++": ["C++", "Cpp"], "Java": ["Java"]}
    with pytest.raises(SpecError, match=r"label 'C' of 'lang' begins label 'C\+\+'") as caught:
        tokenise_prompt(byte_tokenizer, PromptSpec(), [task("lang", labels, scoring=scoring)])
    assert len(str(caught.value).splitlines()) == 1
    told = {**labels, "C": ["plain C"]}
    tokenise_prompt(byte_tokenizer, PromptSpec(), [task("lang", told, scoring=scoring)])
    tokenise_prompt(byte_tokenizer, PromptSpec(), [task("lang", labels, length_penalty=1.0)])
