"""Documents: one row for each row of the input, with its id, its hash and what is wrong with it.

Knows what makes a text readable and how a document is named. Knows nothing of files or formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from pipeline.hashes import short_hash

OK = "ok"
EMPTY = "empty"
TRUNCATED = "truncated"
QUARANTINED = "quarantined"

# What is held at once of a shard's text: so many rows, or the row that reaches so many characters.
SLICE_ROWS = 10_000
SLICE_CHARS = 32 * 1024 * 1024

SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("text", pa.large_string()),
        ("content_hash", pa.string()),
        ("n_chars", pa.int64()),
        ("status", pa.string()),
    ]
)


_Document = tuple[str, str | None, str, int, str]  # as SCHEMA has it


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as its file has it: nothing is known of the values yet."""

    text: object = None
    id: object = None
    problem: str | None = None  # why the row has neither


def documents_from(rows: Iterable[RawRow]) -> pa.Table:
    """doc_id, text, content_hash, n_chars, status: one row each, in order, none left out."""
    return _table(map(_document, rows))


def slices_from(rows: Iterable[RawRow]) -> Iterator[pa.Table]:
    """What `documents_from` gives, in tables of which one is held at a time."""
    documents = map(_document, rows)
    table = _table(_first(documents))
    while table.num_rows:
        yield table
        del table  # before the next is made
        table = _table(_first(documents))


def _first(documents: Iterator[_Document]) -> Iterator[_Document]:
    """The next documents, as many as a slice holds."""
    chars = 0
    for rows, document in enumerate(documents, start=1):
        *_, n_chars, _ = document
        chars += n_chars
        yield document
        if rows == SLICE_ROWS or chars >= SLICE_CHARS:
            return


def _table(documents: Iterable[_Document]) -> pa.Table:
    columns: list[list[object]] = [[] for _ in SCHEMA]
    for document in documents:
        for column, value in zip(columns, document, strict=True):
            column.append(value)
    arrays = [pa.array(column, kind.type) for column, kind in zip(columns, SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _document(row: RawRow) -> _Document:
    text, encoded, problem = read_text(row)
    content_hash = short_hash(encoded)
    doc_id = content_hash if row.id is None else written(row.id)
    if isinstance(row.id, TooLong) or len(doc_id) > MAX_ID_CHARS:
        doc_id, problem = short_hash(doc_id.encode()), id_too_long()
    if problem is not None:
        return doc_id, None, content_hash, 0, f"error:{problem}"
    status = OK if text and not text.isspace() else EMPTY
    return doc_id, text, content_hash, len(text), status


def read_text(row: RawRow) -> tuple[str, bytes, str | None]:
    """The row's text, its UTF-8, and what is wrong with it."""
    if row.problem is not None:
        return "", b"", row.problem
    try:
        if isinstance(row.text, bytes):
            return row.text.decode("utf-8"), row.text, None
        if isinstance(row.text, str):
            return row.text, row.text.encode("utf-8"), None
    except UnicodeError:  # bytes that are not UTF-8, or half of a surrogate pair out of JSON
        return "", b"", "invalid UTF-8"
    if isinstance(row.text, TooLong):
        return "", b"", too_long()
    return "", b"", "no text" if row.text is None else "text is not a string"


def written(value: object) -> str:
    """An id as a string; bytes that are no text are shown, so that two ids stay two."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


# A text that is longer is no document that a model reads; held, it is there several times over.
MAX_ROW_BYTES = 256 * 1024 * 1024
# Ids are kept for all rows of a shard at once; URLs, the longest in use, are rarely over 2,048.
MAX_ID_CHARS = 4_096


def too_long() -> str:
    """Why a row above the limit has no text."""
    return f"longer than {MAX_ROW_BYTES:,} bytes"


def id_too_long() -> str:
    """Why a row whose id is above the limit is set aside."""
    return f"its id is longer than {MAX_ID_CHARS:,} characters"


@dataclass(frozen=True, slots=True)
class TooLong:
    """Stands for a value that was above the limit and is not held."""


class Gathered:
    """One row's bytes as they come; of a row above the limit none are held."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size_bytes = 0
        self.blank = True

    def add(self, part: bytes) -> None:
        """One more part of the row."""
        self._size_bytes += len(part)
        self.blank = self.blank and part.isspace()
        if self._size_bytes > MAX_ROW_BYTES:
            self._parts.clear()
        else:
            self._parts.append(part)

    def take(self) -> bytes | TooLong:
        """The row, which is let go of."""
        whole = TooLong() if self._size_bytes > MAX_ROW_BYTES else b"".join(self._parts)
        self._parts.clear()
        return whole
