"""Continuations: those of transformers' `generate`, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from generation import generated
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline.inference.continuations as module
from pipeline.inference.continuations import Continuation, ContinuationEngine, padded_batches
from pipeline.inference.model.loaded import LoadedModel, plain_attention

TinyModel = Callable[[str], LoadedModel]
FUSED = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "gpt_oss", "olmo2", "phi3"]


def some_ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 250, count).tolist())


def generated_by(
    model: LoadedModel, text: Sequence[int], tokens: int, stop_ids: Sequence[int] = ()
) -> Continuation:
    with plain_attention(model.network, "eager"):
        return generated(model.network, text, tokens, stop_ids)


def engine_of(
    model: LoadedModel, prefix: Sequence[int], stop_ids: Sequence[int] = (), **changes: Any
) -> ContinuationEngine:
    sizes = {"max_batch_tokens": 96, "max_kept_bytes": 1 << 30} | changes
    return ContinuationEngine(model, prefix, stop_ids=stop_ids, **sizes)


def assert_same(own: Continuation | None, expected: Continuation) -> None:
    assert own is not None and list(own.token_ids) == list(expected.token_ids)
    np.testing.assert_allclose(own.p, expected.p, atol=1e-4)


@pytest.mark.parametrize("prefix", [0, 1, 45])
@pytest.mark.parametrize("family", FUSED)
def test_tokens_are_those_of_generate(tiny_model: TinyModel, family: str, prefix: int) -> None:
    model = tiny_model(family)
    above = some_ids(prefix, 1)
    texts = [some_ids(count, count) for count in (1, 40, 7, 90, 3)]
    decoded = engine_of(model, above).decode(texts, 12)
    for text, own in zip(texts, decoded, strict=True):
        assert_same(own, generated_by(model, (*above, *text), 12))


def test_a_stop_token_ends_a_continuation_and_is_part_of_it(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    texts = [some_ids(count, count) for count in range(2, 9)]
    free = engine_of(model, ()).decode(texts, 10)
    stop_ids = sorted({own.token_ids[n] for n, own in enumerate(free) if own})  # one of each text
    ended = engine_of(model, (), stop_ids).decode(texts, 10)
    for text, own in zip(texts, ended, strict=True):
        assert own is not None and own.token_ids[-1] in stop_ids
        assert_same(own, generated_by(model, text, 10, stop_ids))
    assert len({len(own.token_ids) for own in ended if own}) > 1


def test_each_forward_is_a_step(tiny_model: TinyModel) -> None:
    steps: list[None] = []
    texts = [some_ids(60, 1), some_ids(60, 2)]  # two batches of 96 tokens
    engine_of(tiny_model("llama"), ()).decode(texts, 5, on_step=lambda: steps.append(None))
    assert len(steps) == 2 + 4


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(1, 200),
    st.integers(1, 300),
)
def test_a_continuation_depends_on_no_other_text_and_no_limit(
    tiny_model: TinyModel, lengths: list[int], tokens: int, batch: int, kept: int
) -> None:
    model = tiny_model("qwen3")
    texts = [some_ids(length, seed) for seed, length in enumerate(lengths)]
    above = some_ids(9, 77)
    limited = engine_of(model, above, max_batch_tokens=batch, max_kept_bytes=kept * 4_096)
    for text, own in zip(texts, limited.decode(texts, tokens), strict=True):
        (alone,) = engine_of(model, above).decode([text], tokens)
        assert alone is not None
        assert_same(own, alone)


@given(st.lists(st.integers(1, 60), max_size=20), st.integers(1, 100))
def test_a_batch_has_at_most_as_much_padding_as_tokens(lengths: list[int], most: int) -> None:
    batches = list(padded_batches(lengths, most))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        width = max(lengths[i] for i in batch)
        assert width * len(batch) <= max(most, width)
        assert all(2 * lengths[i] >= width for i in batch)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_kept_texts_in_8_bits_change_probabilities_a_little(
    tiny_model: TinyModel, kind: Any
) -> None:
    model = tiny_model("llama")
    texts = [some_ids(count, count) for count in (33, 40, 64)]
    engines = [engine_of(each, some_ids(20, 5)) for each in (model, replace(model, kv=kind))]
    exact, rounded = (engine.decode(texts, 1) for engine in engines)
    assert 0 < 2 * engines[1].peak_kept_bytes < engines[0].peak_kept_bytes
    pairs = [(a, b) for a, b in zip(exact, rounded, strict=True) if a and b]
    assert len(pairs) == 3
    moved = [abs(a.p[0] - b.p[0]) for a, b in pairs]
    assert 1e-7 < max(moved) < 0.01


def test_a_text_too_large_for_the_memory_has_none(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    engine = engine_of(model, some_ids(3, 3))
    texts = [some_ids(count, count) for count in (5, 50, 6, 51)]
    expected = engine.decode(texts, 4)
    plain = module.run

    def run(decoder: Any, attention: Any, positions: Any, **inputs: Any) -> Any:
        if len(positions) > 50:  # the long text alone has 51, and several short ones fit
            raise MemoryError
        return plain(decoder, attention, positions, **inputs)

    monkeypatch.setattr(module, "run", run)
    found = engine.decode(texts, 4)
    assert found[3] is None
    for own, other in zip(found[:3], expected[:3], strict=True):
        assert other is not None
        assert_same(own, other)
