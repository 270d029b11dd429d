"""A search as wide as the trie is exact; a narrower one scores what it reaches, and exactly so."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference
import torch

from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.answers import group_questions
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.labels.searched import search
from pipeline.inference.labels.trie import LabelTrie, Path
from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.fused import FusedSchedule

TinyModel = Callable[[str], LoadedModel]
# fp32 sums of a few thousand terms in another order, as for first tokens, of five tokens.
TOLERANCE = 5e-4


def taxonomy(source: random.Random) -> list[set[Path]]:
    """Three levels of words of one to three tokens, as paths."""
    words = [tuple(source.choices(range(200), k=source.randint(1, 3))) for _ in range(30)]
    paths = {
        (*top, 250, *middle, 250, *source.choice(words))
        for top in source.sample(words, 3)
        for middle in source.sample(words, 3)
        for _ in range(3)
    }
    return [{path} for path in sorted(paths)]


def question_of(labels: list[set[Path]], beam: int | None) -> Question:
    named = {str(i): paths for i, paths in enumerate(labels)}
    return Question("q", (3, 4, 5), named, beam=beam)


@pytest.mark.parametrize("beam", [1, 2, 4])
def test_what_a_narrow_beam_reaches_has_its_exact_log_probability(
    beam: int, tiny_model: TinyModel
) -> None:
    model, source = tiny_model("llama"), random.Random(beam)
    question = question_of(taxonomy(source), beam=beam)
    prompt = PromptTokens((1, 2), (question,))
    document = np.array([5, 6, 7], np.int32)  # as a shard has them
    (log_probs,) = LabelEngine(model, prompt, max_batch_tokens=500).label([document]).log_probs
    asked = (model, (1, 2), [5, 6, 7], question.token_ids)
    expected = np.array(
        [reference.verbalizer_log_prob(*asked, path) for [path] in question.trie.verbalizers]
    )
    reached = np.isfinite(log_probs[0])
    assert 0 < reached.sum() < len(expected)
    np.testing.assert_allclose(log_probs[0][reached], expected[reached], rtol=0, atol=TOLERANCE)


def bigrams(vocabulary: int, seed: int) -> np.ndarray:
    scores = np.random.default_rng(seed).normal(scale=2, size=(vocabulary, vocabulary))
    return scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)


def by_hand(trie: LabelTrie, log_probs: np.ndarray, beam: int) -> set[int]:
    """Labels that a beam reaches, level by level; every path has a parting at every token."""
    live, reached = [(0.0, 0)], set()
    ends = dict(trie.ends)
    while live:
        following = []
        for score, node in live:
            last = trie.token_ids[node] if node else 0
            for child in trie.children(node):
                below = score + log_probs[last, trie.token_ids[child]]
                if child in ends:
                    reached.add(ends[child])
                if trie.children(child):
                    following.append((below, child))
        live = sorted(following, reverse=True)[:beam]
    return reached


@pytest.mark.parametrize("beam", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_the_likeliest_nodes_are_followed_at_every_branching(beam: int, seed: int) -> None:
    source = random.Random(seed)
    letters = [source.sample(range(1, 20), 4) for _ in range(3)]
    paths = [(a, b, c) for a in letters[0] for b in letters[1] for c in letters[2]]
    trie = LabelTrie.of([{path} for path in paths])
    log_probs = bigrams(20, seed)
    table = torch.from_numpy(log_probs).float()

    def states(asked: object) -> torch.Tensor:  # a token's state is its own one-hot vector
        return torch.eye(20)[[path[-1] if path else 0 for path in asked]]  # type: ignore[attr-defined]

    scores = search(trie, states, lambda rows: rows @ table, beam=beam, max_tokens=7)
    assert set(np.flatnonzero(np.isfinite(scores))) == by_hand(trie, log_probs, beam)
    for label in np.flatnonzero(np.isfinite(scores)):
        expected = sum(
            log_probs[a, b] for a, b in zip((0, *paths[label]), paths[label], strict=False)
        )
        assert scores[label] == pytest.approx(expected, abs=1e-5)


def test_what_follows_for_certain_takes_no_forward_of_its_own() -> None:
    trie = LabelTrie.of([{(1, 2, 3, 4, 5)}, {(1, 2, 3, 4, 6, 7, 8)}, {(9, 1, 1, 1)}])
    asked: list[list[Path]] = []

    def states(paths: object) -> torch.Tensor:
        asked.append(list(paths))  # type: ignore[call-overload]
        return torch.zeros(len(asked[-1]), 20)

    scores = search(trie, states, lambda rows: rows, beam=None, max_tokens=1_000)
    assert len(asked) == 3
    assert sorted(path for paths in asked for path in paths) == sorted(map(trie.path, trie.inner))
    np.testing.assert_allclose(scores, -np.log(20) * np.array([5, 7, 4]), rtol=1e-6)


def test_a_trie_that_is_too_large_to_be_read_at_once_is_followed_and_exact(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, source = tiny_model("llama"), random.Random(8)
    question = question_of(taxonomy(source), beam=None)
    prompt = PromptTokens((1, 2), (question,))
    engine = LabelEngine(model, prompt, max_batch_tokens=200)
    assert not question.searched
    at_once = engine.label([[5, 6, 7]]).log_probs[0]
    monkeypatch.setattr("pipeline.inference.labels.prompt_tokens.MAX_NODES_AT_ONCE", 10)
    assert question.searched
    followed = engine.label([[5, 6, 7]]).log_probs[0]
    np.testing.assert_allclose(followed, at_once, rtol=0, atol=TOLERANCE)


def test_a_search_for_which_memory_does_not_suffice_names_its_document(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    question = question_of(taxonomy(random.Random(1)), beam=2)
    prompt = PromptTokens((1, 2), (question,))
    engine = LabelEngine(model, prompt, max_batch_tokens=500)
    with_tokens = FusedSchedule.with_tokens

    def small(self: FusedSchedule, tokens: list[int]) -> FusedSchedule:
        if len(tokens) > 5:
            raise torch.OutOfMemoryError("no room")
        return with_tokens(self, tokens)

    monkeypatch.setattr(FusedSchedule, "with_tokens", small)
    result = engine.label([[5] * 9, [6] * 3])
    assert result.out_of_memory == {0} and engine.max_batch_tokens == 500
    assert np.isnan(result.log_probs[0][0]).all() and np.isfinite(result.log_probs[0][1]).any()


def test_a_search_is_done_in_smaller_parts_before_its_document_is_given_up(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = question_of(taxonomy(random.Random(1)), beam=9)
    prompt = PromptTokens((1, 2), (question,))
    engine = LabelEngine(tiny_model("llama"), prompt, max_batch_tokens=500)
    [expected] = engine.label([[5] * 9]).log_probs
    states, read = FusedSchedule.states, []

    def small(self: FusedSchedule, suffixes: list[Path], **below: Any) -> torch.Tensor:
        read.append(sum(map(len, suffixes)))
        if read[-1] > 100:
            raise torch.OutOfMemoryError("no room")
        return states(self, suffixes, **below)

    monkeypatch.setattr(FusedSchedule, "states", small)
    result = engine.label([[5] * 9])  # alone: no smaller batch of documents can be made
    assert not result.out_of_memory and max(read) > 100
    np.testing.assert_allclose(result.log_probs[0], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "device, kv, groups",
    [
        ("cpu", "none", [["at once", "searched"]]),
        ("cuda", "none", [["at once"], ["searched"]]),
        ("cpu", "int8", [["at once"], ["searched"]]),
    ],
)
def test_other_questions_are_not_answered_in_a_search_where_that_is_slower_or_rounds(
    device: str, kv: str, groups: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {"a": ((1,),), "b": ((2,),)}
    asked = [Question("at once", (5,), labels), Question("searched", (6,), labels, beam=1)]
    for kind in ("OnePassQuestions", "SearchedQuestions"):
        monkeypatch.setattr(
            f"pipeline.inference.labels.answers.{kind}", lambda own, *_: [q.name for q in own]
        )
    model: Any = SimpleNamespace(device=torch.device(device), kv=kv)
    schedule: Any = None
    assert group_questions(asked, schedule, model, {}) == groups
