"""Kept keys and values in 8 bits: the rounding, and the answers of a model that keeps them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from pipeline.inference.attention.reference import LayerKV
from pipeline.inference.attention.rounded_kv import RoundedKV
from pipeline.inference.engine import LabelEngine
from pipeline.inference.labels.prompt_tokens import PromptTokens, Question
from pipeline.inference.memory import plan_memory
from pipeline.inference.model.loaded import LoadedModel, plain_attention

TinyModel = Callable[[str], LoadedModel]


def random_kv(tokens: int, heads: int = 3, dim: int = 8, seed: int = 0) -> LayerKV:
    source = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(tokens, heads, dim, generator=source) for _ in range(2))
    return LayerKV(k * torch.logspace(-3, 3, heads)[:, None], v)


def kept_bytes(rounded: RoundedKV) -> int:
    return rounded.quantized.nbytes + rounded.steps.nbytes


@given(st.integers(1, 96), st.integers(0, 99))
def test_no_number_is_farther_off_than_half_a_step(tokens: int, seed: int) -> None:
    kv = random_kv(tokens, seed=seed)
    widened = RoundedKV.of(kv).widened()
    for own, kept in ((kv.k, widened.k), (kv.v, widened.v)):
        assert own.shape == kept.shape and own.dtype == kept.dtype
        largest = own.abs().amax(dim=2, keepdim=True)
        assert ((own - kept).abs() <= largest / 127 / 2 * (1 + 1e-5)).all()


@given(st.lists(st.integers(1, 64), min_size=1, max_size=4))
def test_spans_are_rounded_each_for_itself(lengths: list[int]) -> None:
    spans = [random_kv(tokens, seed=seed) for seed, tokens in enumerate(lengths)]
    rounded = [RoundedKV.of(span) for span in spans]
    whole = rounded[0]
    for span in rounded[1:]:
        whole = whole.followed_by(span)
    torch.testing.assert_close(
        whole.widened().k, torch.cat([span.widened().k for span in rounded]), rtol=0, atol=0
    )
    assert kept_bytes(whole) == sum(map(kept_bytes, rounded))


def test_zeros_stay_zeros_and_a_step_depends_on_its_token_alone() -> None:
    kv = random_kv(4)
    kv.k[:2] = 0
    widened = RoundedKV.of(kv).widened().k
    assert not widened[:2].any()
    alone = RoundedKV.of(LayerKV(kv.k[2:], kv.v[2:])).widened().k
    torch.testing.assert_close(widened[2:], alone, rtol=0, atol=0)


def some_ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 300, count).tolist())


def answers_below_a_rounded_cache(
    model: LoadedModel, prompt: PromptTokens, document: tuple[int, ...]
) -> np.ndarray:  # [labels]
    """transformers' own forward below a cache whose numbers were rounded."""
    (question,) = prompt.questions
    network: Any = model.network
    with plain_attention(network, "eager"), torch.inference_mode():
        cache = DynamicCache(config=network.config)
        network(input_ids=torch.tensor([prompt.prefix]), **model.cache_kwargs(cache))
        for layer in cache.layers:
            kv = LayerKV(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1))
            kept = RoundedKV.of(kv).widened()
            layer.keys, layer.values = (x.transpose(0, 1)[None] for x in (kept.k, kept.v))
        below = torch.tensor([[*document, *question.token_ids]])
        logits = network(input_ids=below, **model.cache_kwargs(cache)).logits[0, -1]
    log_probs = logits.float().log_softmax(-1)
    first = question.first_tokens.values()
    return np.array([log_probs[list(tokens)].logsumexp(0).item() for tokens in first])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_answers_are_those_below_a_rounded_cache(tiny_model: TinyModel, family: str) -> None:
    model = tiny_model(family)
    question = Question("q", some_ids(5, 1), {"a": [(3,)], "b": [(4,), (5,)], "c": [(6,)]})
    prompt = PromptTokens(some_ids(70, 2), (question,))
    documents = [some_ids(count, count) for count in (1, 9, 40)]
    engine = LabelEngine(replace(model, kv="int8"), prompt, max_batch_tokens=64)
    (rounded,) = engine.label(documents).log_probs
    (exact,) = LabelEngine(model, prompt, max_batch_tokens=64).label(documents).log_probs
    for document, row in zip(documents, rounded, strict=True):
        expected = answers_below_a_rounded_cache(model, prompt, document)
        np.testing.assert_allclose(row, expected, atol=1e-4)
    assert 1e-6 < np.abs(np.exp(rounded) - np.exp(exact)).max() < 0.02


def test_a_beam_reads_documents_that_are_kept_in_8_bits(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    labels = {str(seed): [some_ids(4, seed)] for seed in range(40)}
    question = Question("q", (3, 4), labels, beam=40)
    prompt = PromptTokens((), (question,))  # — nothing but the document is kept
    document = some_ids(50, 3)
    rounded, exact = (
        LabelEngine(replace(model, kv=kept), prompt, max_batch_tokens=256)
        .label([document])
        .log_probs[0]
        for kept in ("int8", "none")
    )
    assert np.isfinite(rounded).all()
    assert 0 < np.abs(np.exp(rounded) - np.exp(exact)).max() < 0.02


def test_the_plan_counts_a_byte_for_each_number_that_is_kept(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    wide, narrow = (
        plan_memory(
            replace(model, kv=kept), prefix_tokens=1_000, free_bytes=1 << 30, most_tokens=100
        )
        for kept in ("none", "int8")
    )
    kv = random_kv(1_000, heads=2)
    rounded = kept_bytes(RoundedKV.of(kv))
    assert narrow.prefix_bytes == rounded * model.layers
    assert wide.prefix_bytes == (kv.k.nbytes + kv.v.nbytes) * model.layers
    assert narrow.prefix_bytes < 0.4 * wide.prefix_bytes  # heads of 8: a step takes half of them
