"""A text's pieces: those of all its tokens, and as many of a text of any length."""

from __future__ import annotations

import random

import pytest
from transformers import PreTrainedTokenizerFast

from pipeline.errors import DocumentError
from pipeline.inference.chunking import (
    CHARS_PER_TOKEN,
    MAX_CHUNKED_CHARS,
    MAX_CHUNKS,
    Chunks,
    TooLong,
    chunk_text,
    chunk_tokens,
)
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.spec.schema import DocumentsSpec

MAX_TOKENS = 8
BOUND = CHARS_PER_TOKEN * MAX_TOKENS


@pytest.fixture
def tokenizer(byte_tokenizer: PreTrainedTokenizerFast) -> DocumentTokenizer:
    return DocumentTokenizer(byte_tokenizer)


def whole(tokenizer: DocumentTokenizer, text: str, too_long: TooLong) -> Chunks:
    """The same by tokenising everything."""
    ids = tokenizer.encode(text)
    return chunk_tokens(ids, max_tokens=MAX_TOKENS, too_long=too_long, overlap_tokens=2)


def fitted(tokenizer: DocumentTokenizer, text: str, too_long: TooLong) -> Chunks:
    rules = DocumentsSpec(max_tokens=MAX_TOKENS, too_long=too_long, overlap_tokens=2)
    return chunk_text(tokenizer, text, rules)


def letters(chars: int, alphabet: str = "abc d\nef") -> str:
    return "".join(random.Random(chars).choices(alphabet, k=chars))


@pytest.mark.parametrize("too_long", ["head", "tail", "middle", "chunk"])
@pytest.mark.parametrize("chars", [0, 1, MAX_TOKENS, MAX_TOKENS + 1, 100, BOUND - 1, BOUND])
@pytest.mark.parametrize("alphabet", ["abc d\nef", "aä漢🙂 "], ids=["ascii", "wide"])
def test_up_to_the_bound_nothing_is_left_out(
    tokenizer: DocumentTokenizer, too_long: TooLong, chars: int, alphabet: str
) -> None:
    text = letters(chars, alphabet)
    assert fitted(tokenizer, text, too_long) == whole(tokenizer, text, too_long)


@pytest.mark.parametrize("too_long", ["head", "tail", "middle", "chunk"])
@pytest.mark.parametrize("chars", [BOUND + 1, BOUND + 2, 7 * BOUND, 100_001])
def test_above_the_bound_what_is_kept_is_what_all_tokens_would_give(
    tokenizer: DocumentTokenizer, too_long: TooLong, chars: int
) -> None:
    text = letters(chars)
    assert fitted(tokenizer, text, too_long) == whole(tokenizer, text, too_long)


@pytest.mark.parametrize("too_long", ["head", "tail"])
def test_above_the_bound_the_ends_are_the_same_whatever_the_letters_take(
    tokenizer: DocumentTokenizer, too_long: TooLong
) -> None:
    text = letters(5 * BOUND, "aä漢🙂 ")
    assert fitted(tokenizer, text, too_long) == whole(tokenizer, text, too_long)


@pytest.mark.parametrize("too_long", ["head", "tail", "middle"])
def test_no_more_than_the_bound_is_tokenised(
    tokenizer: DocumentTokenizer, too_long: TooLong, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    encode = DocumentTokenizer.encode

    def spy(self: DocumentTokenizer, text: str) -> list[int]:
        asked.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(DocumentTokenizer, "encode", spy)
    fitted(tokenizer, letters(10**6), too_long)
    assert asked == [BOUND]


def test_what_is_left_out_is_told_even_where_few_tokens_are_kept(
    byte_tokenizer: PreTrainedTokenizerFast, tokenizer: DocumentTokenizer
) -> None:
    class Sparse(DocumentTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(text)[: MAX_TOKENS - 1]

    kept = fitted(Sparse(byte_tokenizer), letters(BOUND + 1), "head")
    assert kept.tokens == MAX_TOKENS - 1 and kept.truncated


def test_a_text_too_long_for_chunks_is_set_aside_with_its_length(
    tokenizer: DocumentTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DocumentError, match=r"^longer than 20,000,000 characters$"):
        fitted(tokenizer, "a" * (MAX_CHUNKED_CHARS + 1), "chunk")


def test_a_text_of_more_chunks_than_a_row_counts_is_set_aside(
    tokenizer: DocumentTokenizer,
) -> None:
    step = MAX_TOKENS - 2
    most = fitted(tokenizer, letters(MAX_TOKENS + (MAX_CHUNKS - 1) * step), "chunk")
    assert len(most.token_ids) == MAX_CHUNKS
    with pytest.raises(DocumentError, match=r"^more than 32,767 chunks$"):
        fitted(tokenizer, letters(MAX_TOKENS + (MAX_CHUNKS - 1) * step + 1), "chunk")
