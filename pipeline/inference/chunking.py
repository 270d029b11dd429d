"""Cut a document to what the model may read, and put its pieces' answers together again.

Knows token ids and probabilities. Knows nothing of text, models or prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import DocumentError
from pipeline.inference.labels.tokenizer import DocumentTokenizer
from pipeline.spec.schema import DocumentsSpec

TooLong = Literal["head", "tail", "middle", "chunk"]
Combine = Literal["max", "mean"]

# A label file counts a document's chunks in 16 bits.
MAX_CHUNKS = 32_767


@dataclass(frozen=True, slots=True)
class Pieces:
    """What is read of one document: one piece, or overlapping ones that cover it."""

    token_ids: tuple[tuple[int, ...], ...]
    truncated: bool

    @property
    def tokens(self) -> int:
        return sum(len(piece) for piece in self.token_ids)


def fit(
    token_ids: Sequence[int], *, max_tokens: int, too_long: TooLong, overlap_tokens: int
) -> Pieces:
    """The document in pieces of at most `max_tokens`; `middle` keeps its middle.

    DocumentError if it has more chunks than `MAX_CHUNKS`.

    fit(range(9), max_tokens=4, too_long="chunk", overlap_tokens=1) -> 0-3, 3-6, 5-8
    """
    ids = tuple(token_ids)
    if len(ids) <= max_tokens:
        return Pieces((ids,), truncated=False)
    if too_long == "chunk":
        return Pieces(tuple(_chunks(ids, max_tokens, overlap_tokens)), truncated=False)
    first = {"head": 0, "middle": (len(ids) - max_tokens) // 2, "tail": len(ids) - max_tokens}
    start = first[too_long]
    return Pieces((ids[start : start + max_tokens],), truncated=True)


def _chunks(ids: tuple[int, ...], size: int, overlap: int) -> list[tuple[int, ...]]:
    last = len(ids) - size
    starts = [*range(0, last, size - overlap), last]
    if len(starts) > MAX_CHUNKS:
        raise DocumentError(f"more than {MAX_CHUNKS:,} chunks")
    return [ids[start : start + size] for start in starts]


def combine(
    log_probs: NDArray[np.float32],  # [pieces, labels]
    how: Combine,
) -> NDArray[np.float32]:  # [labels]
    """One answer from a document's pieces.

    `max`: the answer of the piece where the first label is likeliest among the labels.
    `mean`: the mean probability of each label.
    """
    pieces, _labels = log_probs.shape
    if how == "max":
        share = log_probs[:, 0] - np.logaddexp.reduce(log_probs, axis=1)
        chosen: NDArray[np.float32] = log_probs[int(share.argmax())]
        return chosen
    mean = np.logaddexp.reduce(log_probs, axis=0) - np.log(pieces)
    return np.asarray(mean, dtype=np.float32)


# A tokenizer takes some hundred bytes for each token that it finds, kept or not. Text of human
# languages has below ten characters a token; a text that is longer than so many times what is
# kept is cut to that before it is tokenised.
CHARS_PER_TOKEN = 64
# Of chunks all is kept, so there is nothing to leave out: a longer text is not read.
MAX_CHUNKED_CHARS = 20_000_000


def fit_text(tokenizer: DocumentTokenizer, text: str, rules: DocumentsSpec) -> Pieces:
    """The text's pieces; DocumentError if it holds control tokens or is too long for chunks.

    Up to `CHARS_PER_TOKEN * max_tokens` characters these are the pieces of all its tokens. Above,
    `head`, `tail` and `middle` are those of so many characters there, and it is truncated.
    """
    if rules.too_long == "chunk":
        if len(text) > MAX_CHUNKED_CHARS:
            raise DocumentError(f"longer than {MAX_CHUNKED_CHARS:,} characters")
        near = text
    else:
        near = _near(text, rules.too_long, rules.max_tokens * CHARS_PER_TOKEN)
    pieces = fit(
        tokenizer.encode(near),
        max_tokens=rules.max_tokens,
        too_long=rules.too_long,
        overlap_tokens=rules.overlap_tokens,
    )
    return Pieces(pieces.token_ids, pieces.truncated or len(near) < len(text))


def _near(text: str, too_long: TooLong, chars: int) -> str:
    """The text, or so many characters of the part that is kept of it."""
    left_out = max(0, len(text) - chars)
    start = {"head": 0, "middle": left_out // 2, "tail": left_out}[too_long]
    return text[start : start + chars]
