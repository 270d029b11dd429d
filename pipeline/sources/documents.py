"""Documents: one row for each row of the input, with its id, its hash and its status.

Entry points: `documents_from`, and `slices_from` for input that does not fit in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import NamedTuple

import pyarrow as pa

from pipeline.errors import DocumentError
from pipeline.hashes import short_hash
from pipeline.sources.id_text import id_text

OK = "ok"
EMPTY = "empty"
TRUNCATED = "truncated"
QUARANTINED = "quarantined"
SKIPPED = "skipped"  # the question is not asked about this document


def is_failed_status(status: str) -> bool:
    """Whether a row with this status should have an answer and has none."""
    return status == QUARANTINED or status.startswith("error:")


# What gives the image file of a value of a row; DocumentError if there is none.
ImageOf = Callable[[object], bytes]

# A slice of a shard's text that is held at once ends at this number of rows, or at the row that
# reaches this number of characters.
SLICE_ROWS = 10_000
SLICE_CHARS = 32 * 1024 * 1024
# A longer text is not a document for a model, and while it is read it is held several times.
MAX_ROW_BYTES = 256 * 1024 * 1024
# The ids of all rows of a shard are held at once. The longest in use are URLs, mostly below 2,048.
MAX_ID_CHARS = 4_096

# Of documents with an image, SCHEMA has this column too.
IMAGE_FIELD = pa.field("image", pa.large_binary())
SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("text", pa.large_string()),
        ("content_hash", pa.string()),
        ("n_chars", pa.int64()),
        ("status", pa.string()),
    ]
)

# The columns of SCHEMA, and the image
_Document = tuple[str, str | None, str, int, str, bytes | None]


# The names of the columns that a reader of rows is asked for; None: all of them.
Names = Sequence[str] | None


class Row(NamedTuple):
    """A row as its file has it: at least the columns that are asked for, where it has them."""

    values: Mapping[str, object] = {}
    problem: str | None = None  # why its values cannot be used
    place: str | None = None  # in place of an id, of a row that cannot be read from its file


@dataclass(frozen=True, slots=True)
class RawRow:
    """The values of a row that make a document; they are not checked yet."""

    text: object = None
    id: object = None
    image: object = None  # bytes, or where they are
    problem: str | None = None  # why the row has none of them


@dataclass(frozen=True, slots=True)
class TooLong:
    """A value above the limit, which is not held."""


def documents_from(rows: Iterable[RawRow]) -> pa.Table:
    """The documents (SCHEMA), one for each row, in order."""
    return _table(map(_document, rows))


def slices_from(rows: Iterable[RawRow], image_of: ImageOf | None = None) -> Iterator[pa.Table]:
    """The table of `documents_from` in slices, of which one is held at a time.

    With `image_of`, the documents have an image each, and the column IMAGE_FIELD.
    """
    documents = map(partial(_document, image_of=image_of), rows)
    schema = SCHEMA if image_of is None else SCHEMA.append(IMAGE_FIELD)
    table = _table(_next_slice(documents), schema)
    while table.num_rows:
        yield table
        del table  # before the next slice is made
        table = _table(_next_slice(documents), schema)


def images_of(documents: pa.Table) -> Iterator[bytes | None]:
    """The image of each document, one at a time; None where there is none."""
    if IMAGE_FIELD.name not in documents.column_names:
        return repeat(None, documents.num_rows)
    return (image.as_py() for image in documents.column(IMAGE_FIELD.name))


def _next_slice(documents: Iterator[_Document]) -> Iterator[_Document]:
    chars = 0
    for rows, document in enumerate(documents, start=1):
        *_, n_chars, _, image = document
        chars += n_chars + len(image or b"")
        yield document
        if rows == SLICE_ROWS or chars >= SLICE_CHARS:
            return


def _table(documents: Iterable[_Document], schema: pa.Schema = SCHEMA) -> pa.Table:
    columns = list(zip(*documents, strict=True)) or [()] * len(schema)
    return pa.table(dict(zip(schema.names, columns, strict=False)), schema=schema)


def _document(row: RawRow, image_of: ImageOf | None = None) -> _Document:
    image = None
    if image_of is not None and row.text is None:
        row = replace(row, text="")
    text, encoded, problem = read_text(row)
    if image_of is not None and problem is None:
        try:
            image = image_of(row.image)
            # — a digest has a fixed length; of the bytes alone, two pairs could be equal
            encoded = b"image" + hashlib.sha256(image).digest() + encoded
        except DocumentError as error:
            problem = str(error)
    content_hash = short_hash(encoded)
    # — pandas writes NaN for a missing id
    has_id = row.id is not None and row.id == row.id
    doc_id = id_text(row.id) if has_id else content_hash
    if isinstance(row.id, TooLong) or len(doc_id) > MAX_ID_CHARS:
        doc_id = short_hash(doc_id.encode())
        problem = f"its id is longer than {MAX_ID_CHARS:,} characters"
    if problem is not None:
        return doc_id, None, content_hash, 0, f"error:{problem}", None
    status = OK if image is not None or (text and not text.isspace()) else EMPTY
    return doc_id, text, content_hash, len(text), status, image


def read_text(row: RawRow) -> tuple[str, bytes, str | None]:
    """The row's text, the text in UTF-8, and why there is none."""
    if row.problem is not None:
        return "", b"", row.problem
    try:
        if isinstance(row.text, bytes):
            return row.text.decode("utf-8"), row.text, None
        if isinstance(row.text, str):
            return row.text, row.text.encode("utf-8"), None
    except UnicodeError:  # bytes that are not UTF-8, or half a surrogate pair from JSON
        return "", b"", "invalid UTF-8"
    if isinstance(row.text, TooLong):
        return "", b"", too_long()
    return "", b"", "no text" if row.text is None else "text is not a string"


def too_long() -> str:
    """Why a row above the limit has no text."""
    return f"longer than {MAX_ROW_BYTES:,} bytes"
