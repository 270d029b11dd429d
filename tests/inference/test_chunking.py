"""Cutting a document and combining its answers: what is kept, covered and combined."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from pipeline.errors import DocumentError
from pipeline.inference.chunking import (
    CHARS_PER_TOKEN,
    MAX_CHUNKED_CHARS,
    MAX_CHUNKS,
    MOST_CHARS_PER_TOKEN,
    Chunks,
    TooLong,
    chunk_text,
    chunk_texts,
    chunk_tokens,
    combine,
)
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.spec.stages import DocumentsSpec

PLACES: list[TooLong] = ["head", "tail", "middle", "chunk"]
# One rounding to float32 of log-probabilities below 16 in size, and of the sum they came from.
TOLERANCE = 4 * 16 * np.finfo(np.float32).eps


@pytest.mark.parametrize("too_long", PLACES)
@given(st.integers(1, 40), st.data())
def test_a_document_that_is_short_enough_is_whole(
    too_long: TooLong, max_tokens: int, data: st.DataObject
) -> None:
    ids = tuple(range(data.draw(st.integers(0, max_tokens))))
    cut = chunk_tokens(ids, max_tokens=max_tokens, too_long=too_long, overlap_tokens=0)
    assert cut == Chunks((ids,), truncated=False)


@given(st.integers(1, 40), st.integers(1, 100))
def test_a_long_document_keeps_the_place_that_the_spec_names(max_tokens: int, more: int) -> None:
    ids = tuple(range(max_tokens + more))
    middle = more // 2  # as many before as after, or one fewer
    for place, start in {"head": 0, "middle": middle, "tail": more}.items():
        cut = chunk_tokens(ids, max_tokens=max_tokens, too_long=place, overlap_tokens=0)  # type: ignore[arg-type]
        assert cut == Chunks((ids[start : start + max_tokens],), truncated=True)


@given(st.integers(1, 40), st.integers(1, 200), st.data())
def test_chunks_lose_no_token_overlap_and_are_as_few_as_possible(
    max_tokens: int, tokens: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, max_tokens - 1))
    ids = range(tokens)
    cut = chunk_tokens(ids, max_tokens=max_tokens, too_long="chunk", overlap_tokens=overlap)
    chunks = cut.token_ids
    assert not cut.truncated
    if tokens > max_tokens:
        assert len(chunks) == math.ceil((tokens - overlap) / (max_tokens - overlap))
    assert {token for chunk in chunks for token in chunk} == set(range(tokens))
    for chunk in chunks:
        assert chunk == tuple(range(chunk[0], chunk[0] + min(tokens, max_tokens)))
    for left, right in pairwise(chunks):
        assert left[0] < right[0]
        assert len(set(left) & set(right)) >= overlap


SEEDS = st.integers(0, 2**32 - 1)


def some_log_probs(seed: int, chunks: int, labels: int) -> NDArray[np.float32]:
    """Labels that leave some of the probability to other tokens."""
    source = np.random.default_rng(seed)
    logits = source.normal(scale=3.0, size=(chunks, labels + 5))
    whole = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return whole[:, :labels].astype(np.float32)


@given(SEEDS, st.integers(1, 9))
def test_the_mean_is_the_mean_probability(seed: int, chunks: int) -> None:
    log_probs = some_log_probs(seed, chunks, 3)
    mean = combine(log_probs, "mean")
    expected = np.log(np.exp(log_probs.astype(np.float64)).mean(axis=0))
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, expected, rtol=0, atol=TOLERANCE)


@given(SEEDS, st.integers(1, 9))
def test_the_maximum_is_the_chunk_with_the_highest_share_of_the_first_label(
    seed: int, chunks: int
) -> None:
    log_probs = some_log_probs(seed, chunks, 3)
    probs = np.exp(log_probs.astype(np.float64))
    surest = (probs[:, 0] / probs.sum(axis=1)).argmax()
    np.testing.assert_array_equal(combine(log_probs, "max"), log_probs[surest])


MAX_TOKENS = 8
BOUND, MOST = CHARS_PER_TOKEN * MAX_TOKENS, MOST_CHARS_PER_TOKEN * MAX_TOKENS


@pytest.fixture
def tokenizer(byte_tokenizer: PreTrainedTokenizerFast) -> DocumentTokenizer:
    return DocumentTokenizer(byte_tokenizer)


def chunked_whole(tokenizer: DocumentTokenizer, text: str, too_long: TooLong) -> Chunks:
    """The same by tokenising everything."""
    ids = tokenizer.encode(text)
    return chunk_tokens(ids, max_tokens=MAX_TOKENS, too_long=too_long, overlap_tokens=2)


def chunked(tokenizer: DocumentTokenizer, text: str, too_long: TooLong) -> Chunks:
    rules = DocumentsSpec(max_tokens=MAX_TOKENS, too_long=too_long, overlap_tokens=2)
    return chunk_text(tokenizer, text, rules)


def letters(chars: int, alphabet: str = "abc d\nef") -> str:
    return "".join(random.Random(chars).choices(alphabet, k=chars))


@pytest.mark.parametrize("too_long", PLACES)
@pytest.mark.parametrize("chars", [0, 1, MAX_TOKENS, 90, BOUND, BOUND + 1, MOST + 1, 50_001])
@pytest.mark.parametrize("alphabet", ["abc d\nef", "aä漢🙂 "], ids=["ascii", "wide"])
def test_what_is_kept_is_what_all_tokens_would_give(
    tokenizer: DocumentTokenizer, too_long: TooLong, chars: int, alphabet: str
) -> None:
    if too_long == "middle" and alphabet.startswith("aä") and chars > BOUND:
        pytest.skip("the middle of the letters is not the middle of the tokens")
    text = letters(chars, alphabet)
    assert chunked(tokenizer, text, too_long) == chunked_whole(tokenizer, text, too_long)


@pytest.mark.parametrize("too_long", ["head", "tail", "middle"])
@pytest.mark.parametrize("token_chars, expected", [(1, [BOUND]), (12, [BOUND, MOST])])
def test_little_is_tokenised_and_more_only_where_tokens_are_long(
    byte_tokenizer: PreTrainedTokenizerFast,
    too_long: TooLong,
    token_chars: int,
    expected: list[int],
) -> None:
    encoded: list[int] = []

    class Spy(DocumentTokenizer):
        def encode_all(self, texts: Sequence[str]) -> Iterator[list[int] | DocumentError]:
            for text in texts:
                encoded.append(len(text))
                yield list(range(0, len(text), token_chars))

    kept = chunked(Spy(byte_tokenizer), letters(10**6), too_long)
    assert encoded == expected and len(kept.token_ids[0]) == MAX_TOKENS and kept.truncated


def test_what_is_left_out_is_reported_even_where_few_tokens_are_kept(
    byte_tokenizer: PreTrainedTokenizerFast, tokenizer: DocumentTokenizer
) -> None:
    class Sparse(DocumentTokenizer):
        def encode_all(self, texts: Sequence[str]) -> Iterator[list[int] | DocumentError]:
            return (tokenizer.encode(text)[: MAX_TOKENS - 1] for text in texts)

    kept = chunked(Sparse(byte_tokenizer), letters(MOST + 1), "head")
    assert len(kept.token_ids[0]) == MAX_TOKENS - 1 and kept.truncated


@pytest.mark.parametrize("batch_chars", [1, 30, 10**6])
@pytest.mark.parametrize("too_long", PLACES)
def test_texts_that_are_tokenised_together_have_the_chunks_and_the_errors_of_each_alone(
    tokenizer: DocumentTokenizer,
    too_long: TooLong,
    batch_chars: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.inference.labels.tokenizer._BATCH_CHARS", batch_chars)
    monkeypatch.setattr("pipeline.inference.chunking.MAX_CHUNKED_CHARS", 800)
    tokenizer.control_ids = frozenset(tokenizer.encode("z"))
    texts = [letters(n) for n in (0, 5, 12, BOUND + 9, 900)]
    texts[2:2] = ["a z", "a" * 40 + "z"]
    rules = DocumentsSpec(max_tokens=MAX_TOKENS, too_long=too_long, overlap_tokens=2)

    def alone(text: str) -> Chunks | str:
        try:
            return chunk_text(tokenizer, text, rules)
        except DocumentError as error:
            return str(error)

    together = chunk_texts(tokenizer, texts, rules)
    assert [each if isinstance(each, Chunks) else str(each) for each in together] == [
        alone(text) for text in texts
    ]
    assert not list(chunk_texts(tokenizer, [], rules))


def test_a_text_too_long_for_chunks_is_set_aside_with_its_length(
    tokenizer: DocumentTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DocumentError, match=r"^longer than 20,000,000 characters$"):
        chunked(tokenizer, "a" * (MAX_CHUNKED_CHARS + 1), "chunk")


def test_a_text_of_more_chunks_than_a_row_counts_is_set_aside(
    tokenizer: DocumentTokenizer,
) -> None:
    step = MAX_TOKENS - 2
    most = chunked(tokenizer, letters(MAX_TOKENS + (MAX_CHUNKS - 1) * step), "chunk")
    assert len(most.token_ids) == MAX_CHUNKS
    with pytest.raises(DocumentError, match=r"^more than 32,767 chunks$"):
        chunked(tokenizer, letters(MAX_TOKENS + (MAX_CHUNKS - 1) * step + 1), "chunk")
