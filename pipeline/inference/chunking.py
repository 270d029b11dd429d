"""Cut a document to what the model may read, and combine its chunks' answers again.

Entry points: `chunk_texts` before the model, `combine` after it, and `chunk_spans` of the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import DocumentError
from pipeline.spec.stages import DocumentsSpec

TooLong = Literal["head", "tail", "middle", "chunk"]
Combine = Literal["max", "mean"]
TextOrTokens = TypeVar("TextOrTokens", str, tuple[int, ...])

# A label file counts a document's chunks in 16 bits.
MAX_CHUNKS = 32_767
# A tokenizer takes time and some hundred bytes for each token that it makes, kept or not. So a text
# is cut before it is tokenised, to the first of these numbers of characters for each token that may
# be kept. Human languages have fewer than ten; where this gives too few tokens, to the second.
CHARS_PER_TOKEN, MOST_CHARS_PER_TOKEN = 12, 64
# Tokens that are not kept, because the cut may have changed them.
_CUT_TOKENS = 32
# With `chunk` every token is kept, so nothing can be cut: a longer text is refused.
MAX_CHUNKED_CHARS = 20_000_000


class Encoder(Protocol):
    """What makes tokens of documents: `DocumentTokenizer`, or `ByteEncoder` for a server."""

    def encode(self, text: str) -> list[int]: ...

    def encode_all(self, texts: Sequence[str]) -> Iterator[list[int] | DocumentError]: ...

    def offsets(self, text: str) -> list[tuple[int, int]]: ...


@dataclass(frozen=True, slots=True)
class Chunks:
    """What is read of one document: one chunk, or overlapping chunks that cover it."""

    token_ids: tuple[tuple[int, ...], ...]
    truncated: bool


def chunk_text(tokenizer: Encoder, text: str, rules: DocumentsSpec) -> Chunks:
    """The chunks of one text, as `chunk_texts` has them; raises the error."""
    [chunks] = chunk_texts(tokenizer, [text], rules)
    if isinstance(chunks, DocumentError):
        raise chunks
    return chunks


def chunk_texts(
    tokenizer: Encoder, texts: Sequence[str], rules: DocumentsSpec
) -> Iterator[Chunks | DocumentError]:
    """Each text's chunks; an error if it has control tokens or is too long for `chunk`.

    `head`, `tail` and `middle` tokenise at most `MOST_CHARS_PER_TOKEN * max_tokens` characters at
    that place; a longer text is truncated.
    """
    place = rules.too_long
    near, most = (rules.max_tokens * n for n in (CHARS_PER_TOKEN, MOST_CHARS_PER_TOKEN))
    if place == "chunk":
        kept = [text if len(text) <= MAX_CHUNKED_CHARS else "" for text in texts]
    else:
        kept = [_window(text, near, place) for text in texts]
    encoded = tokenizer.encode_all(kept)
    for text, own, token_ids in zip(texts, kept, encoded, strict=True):
        read = own
        try:
            if place == "chunk" and len(own) < len(text):
                raise DocumentError(f"longer than {MAX_CHUNKED_CHARS:,} characters")
            if isinstance(token_ids, DocumentError):
                raise token_ids
            are_few = len(own) < len(text) and len(token_ids) < rules.max_tokens + _CUT_TOKENS
            if are_few and place != "chunk":
                read = _window(text, most, place)
                token_ids = tokenizer.encode(read)
            cut = chunk_tokens(
                token_ids,
                max_tokens=rules.max_tokens,
                too_long=place,
                overlap_tokens=rules.overlap_tokens,
            )
            yield Chunks(cut.token_ids, cut.truncated or len(read) < len(text))
        except DocumentError as error:
            yield error


def chunk_tokens(
    token_ids: Sequence[int], *, max_tokens: int, too_long: TooLong, overlap_tokens: int
) -> Chunks:
    """The document in chunks of at most `max_tokens`; `middle` keeps its middle.

    DocumentError if it has more than `MAX_CHUNKS` chunks.

    chunk_tokens(range(9), max_tokens=4, too_long="chunk", overlap_tokens=1) -> 0-3, 3-6, 5-8
    """
    ids = tuple(token_ids)
    if len(ids) <= max_tokens:
        return Chunks((ids,), truncated=False)
    if too_long != "chunk":
        return Chunks((_window(ids, max_tokens, too_long),), truncated=True)
    starts = chunk_starts(len(ids), max_tokens=max_tokens, overlap_tokens=overlap_tokens)
    if len(starts) > MAX_CHUNKS:
        raise DocumentError(f"more than {MAX_CHUNKS:,} chunks")
    return Chunks(tuple(ids[start : start + max_tokens] for start in starts), truncated=False)


def chunk_starts(tokens: int, *, max_tokens: int, overlap_tokens: int) -> list[int]:
    """The first token of each chunk of a document that is longer than one."""
    last = tokens - max_tokens
    return [*range(0, last, max_tokens - overlap_tokens), last]


def chunk_spans(tokenizer: Encoder, text: str, rules: DocumentsSpec) -> list[tuple[int, int]]:
    """Where each of several chunks begins and ends in the text, in characters.

    Neighbours overlap as their tokens do. The chunks together are the whole text.
    """
    places = tokenizer.offsets(text)
    most, overlap = rules.max_tokens, rules.overlap_tokens
    starts = chunk_starts(len(places), max_tokens=most, overlap_tokens=overlap)
    spans = [(places[start][0], places[start + most - 1][1]) for start in starts]
    return [(0, spans[0][1]), *spans[1:-1], (spans[-1][0], len(text))]


def _window(
    whole: TextOrTokens, size: int, place: Literal["head", "tail", "middle"]
) -> TextOrTokens:
    """At most `size` items from this place of a text or of its tokens."""
    left_out = max(0, len(whole) - size)
    start = {"head": 0, "middle": left_out // 2, "tail": left_out}[place]
    return whole[start : start + size]


def deciding(log_probs: NDArray[np.float32]) -> int:  # [chunks, labels]
    """The chunk whose first label has the largest share among the labels."""
    return int((log_probs[:, 0] - np.logaddexp.reduce(log_probs, axis=1)).argmax())


def combine(
    log_probs: NDArray[np.float32],  # [chunks, labels]
    how: Combine,
) -> NDArray[np.float32]:  # [labels]
    """One answer from a document's chunks.

    `max`: the answer of the chunk that is `deciding`.
    `mean`: the mean probability of each label.
    """
    chunks, _labels = log_probs.shape
    if how == "max":
        answer: NDArray[np.float32] = log_probs[deciding(log_probs)]
        return answer
    mean = np.logaddexp.reduce(log_probs, axis=0) - np.log(chunks)
    return np.asarray(mean, dtype=np.float32)
