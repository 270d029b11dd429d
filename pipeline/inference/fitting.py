"""A document's text as the pieces that the model reads, at a bounded cost however long it is.

Knows a document's tokenizer and what may be kept of a text. Knows nothing of rows or models.
"""

from __future__ import annotations

from pipeline.errors import DocumentError
from pipeline.inference.pieces import Pieces, TooLong, fit
from pipeline.inference.tokens import DocumentTokenizer
from pipeline.spec import DocumentsSpec

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
