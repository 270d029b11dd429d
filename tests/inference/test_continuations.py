"""Continuations of many prompts: those of plain greedy decoding of each prompt alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from generation import greedily_decoded
from hypothesis import given, settings
from hypothesis import strategies as st
from processors import needs_products
from transformers import GenerationConfig

from pipeline.inference.attention.hook import IMPLEMENTATION
from pipeline.inference.continuations import Continuation, ContinuationEngine
from pipeline.inference.loading import prepare
from pipeline.inference.model.int8_products import round_linear
from pipeline.inference.model.llama_layer import LlamaLayer, set_feed_forward_rows
from pipeline.inference.model.loaded import LoadedModel, plain_attention

TinyModel = Callable[[str], LoadedModel]
FUSED = [
    "llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "mistral", "gpt_oss", "olmo2",
    "phi3",
]  # fmt: skip
LENGTHS = (1, 40, 7, 90, 3)  # below and above the windows of 16 tokens
# About 20 products in sequence, each of at most 100 terms in another order: their errors of 2^-24
# add up, like random ones, to 45 of them, of logits up to 10. A probability moves by at most half.
ATOL = 1.5e-5


def some_ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 250, count).tolist())


def expected_of(
    model: LoadedModel, prompt: Sequence[int], tokens: int, stop_ids: Sequence[int] = ()
) -> Continuation:
    with plain_attention(model.network, "eager"):
        return greedily_decoded(model.network, prompt, tokens, stop_ids)


def engine_of(
    model: LoadedModel, stop_ids: Sequence[int] = (), max_batch_tokens: int = 1_000
) -> ContinuationEngine:
    return ContinuationEngine(model, stop_ids=stop_ids, max_batch_tokens=max_batch_tokens)


def assert_same(actual: Continuation | None, expected: Continuation, atol: float = ATOL) -> None:
    assert actual is not None and list(actual.token_ids) == list(expected.token_ids)
    np.testing.assert_allclose(actual.p, expected.p, rtol=0, atol=atol)


@pytest.mark.parametrize("family", FUSED)
def test_tokens_are_those_of_greedy_decoding_of_each_prompt_alone(
    tiny_model: TinyModel, family: str
) -> None:
    model = tiny_model(family)
    prompts = [some_ids(count, count) for count in LENGTHS]
    decoded = engine_of(model).decode(prompts, 12)
    for prompt, actual in zip(prompts, decoded, strict=True):
        assert_same(actual, expected_of(model, prompt, 12))
    assert model.network.config._attn_implementation == IMPLEMENTATION


def test_a_model_whose_layers_read_the_tree_themselves_continues_alike(make_network: Any) -> None:
    prompts = [some_ids(count, count) for count in LENGTHS]
    model = prepare(make_network("llama"))
    set_feed_forward_rows(model.decoder, 8)
    assert all(isinstance(each.forward, LlamaLayer) for each in model.network.model.layers)
    for prompt, actual in zip(prompts, engine_of(model).decode(prompts, 6), strict=True):
        assert_same(actual, expected_of(prepare(make_network("llama")), prompt, 6))


@needs_products
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_model_with_products_of_8_bit_integers_continues_alike(
    family: str, make_network: Any
) -> None:
    model = prepare(make_network(family))
    round_linear(model.network, "cpu")
    prompts = [some_ids(count, count) for count in LENGTHS]
    for prompt, actual in zip(prompts, engine_of(model).decode(prompts, 6), strict=True):
        # — a step is 1/127 of a row's largest value: a value on the edge may go to either side
        assert_same(actual, expected_of(model, prompt, 6), atol=0.01)


def test_a_stop_token_ends_a_continuation_and_is_part_of_it(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    prompts = [some_ids(count, count) for count in range(2, 9)]
    free = engine_of(model).decode(prompts, 10)
    # — one of each prompt
    stop_ids = sorted({own.token_ids[n] for n, own in enumerate(free) if own})
    ended = engine_of(model, stop_ids).decode(prompts, 10)
    for prompt, actual in zip(prompts, ended, strict=True):
        assert actual is not None and actual.token_ids[-1] in stop_ids
        assert_same(actual, expected_of(model, prompt, 10, stop_ids))
    assert len({len(own.token_ids) for own in ended if own}) > 1


def test_settings_in_the_files_of_a_model_change_no_token(make_network: Any) -> None:
    network = make_network("llama")
    model = prepare(network)
    prompts = [some_ids(count, count) for count in LENGTHS]
    expected = [expected_of(model, prompt, 12) for prompt in prompts]
    stop = expected[0].token_ids[3]
    settings = GenerationConfig(
        repetition_penalty=9.0, no_repeat_ngram_size=1, num_beams=2, eos_token_id=stop
    )
    network.generation_config = settings
    for actual, other in zip(engine_of(model).decode(prompts, 12), expected, strict=True):
        assert_same(actual, other)
    assert network.generation_config is settings


def test_each_token_is_a_step_and_each_batch_says_how_many_prompts_are_done(
    tiny_model: TinyModel,
) -> None:
    steps: list[int] = []
    prompts = [some_ids(60, 1), some_ids(60, 2), some_ids(20, 3)]
    engine_of(tiny_model("llama"), max_batch_tokens=130).decode(prompts, 5, on_step=steps.append)
    assert steps == [*[0] * 5, 2, *[0] * 5, 1]


@settings(max_examples=20)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 6), st.integers(1, 200))
def test_a_continuation_depends_on_no_other_prompt_and_no_limit(
    tiny_model: TinyModel, lengths: list[int], tokens: int, batch: int
) -> None:
    model = tiny_model("qwen3")
    prompts = [some_ids(length, seed) for seed, length in enumerate(lengths)]
    decoded = engine_of(model, max_batch_tokens=batch).decode(prompts, tokens)
    for prompt, actual in zip(prompts, decoded, strict=True):
        (alone,) = engine_of(model).decode([prompt], tokens)
        assert alone is not None
        assert_same(actual, alone)


@pytest.fixture
def short_memory(make_network: Any) -> Iterator[LoadedModel]:
    """A model whose memory is short for more than 120 tokens with padding."""
    model = prepare(make_network("llama"))
    network: Any = model.network
    plain = network.generate

    def generate(ids: Any, **options: Any) -> Any:
        if ids.numel() > 120:
            raise MemoryError
        return plain(ids, **options)

    network.generate = generate
    yield model


def test_a_prompt_too_large_for_the_memory_has_none_and_a_batch_is_halved(
    short_memory: LoadedModel,
) -> None:
    prompts = [some_ids(count, count) for count in (5, 121, 50, 6, 51, 122)]
    decoded = engine_of(short_memory).decode(prompts, 4)
    assert [continuation is None for continuation in decoded] == [
        len(prompt) > 120 for prompt in prompts
    ]
    for prompt, actual in zip(prompts, decoded, strict=True):
        if len(prompt) <= 120:
            assert_same(actual, expected_of(short_memory, prompt, 4))
