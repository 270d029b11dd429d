"""The text and id columns of a table: their types are checked, and their rows are read.

Entry points: `check_columns`, `batches_between`, `rows_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
from pyarrow import types

from pipeline.errors import Problem, SpecError
from pipeline.sources.documents import MAX_ROW_BYTES, RawRow, TooLong

# Above this size, the values of a batch become Python objects one by one; below, all at once.
BATCH_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Batches:
    """Some rows of an open table, read batch by batch as they are asked for."""

    schema: pa.Schema  # of the object; the batches may have fewer columns
    batches: Iterator[pa.RecordBatch]
    codecs: Mapping[str, str] = field(default_factory=dict)  # of Parquet, by leaf column


def check_named(path: str, names: list[str], *, text_column: str, id_column: str | None) -> None:
    """SpecError unless the object at `path` has both columns, each exactly once."""
    columns = {"input.text": text_column} | ({"input.id": id_column} if id_column else {})
    existing = ", ".join(sorted(names)) or "none"
    problems = [
        Problem(
            place, f"{path} has {names.count(name) or 'no'} such column; it has: {existing}", name
        )
        for place, name in columns.items()
        if names.count(name) != 1
    ]
    if problems:
        raise SpecError(problems)


def check_columns(path: str, schema: pa.Schema, *, text_column: str, id_column: str | None) -> None:
    """SpecError unless the text column has strings, and the id column strings or numbers."""
    check_named(path, schema.names, text_column=text_column, id_column=id_column)
    text_type = schema.field(text_column).type
    if not _is_string(text_type):
        fix = f"{path} has {text_type} there, not strings; name a string column"
        raise SpecError([Problem("input.text", fix, text_column)])
    id_type = schema.field(id_column).type if id_column else pa.string()
    if not (_is_string(id_type) or types.is_primitive(id_type)):
        fix = f"{path} has {id_type} there; name a column of strings or numbers, or none"
        raise SpecError([Problem("input.id", fix, id_column)])


def batches_between(
    batches: Iterable[pa.RecordBatch], start: int, end: int
) -> Iterator[pa.RecordBatch]:
    """Rows `start` to before `end` of the concatenated batches. No later batch is read."""
    position = 0
    for batch in batches:
        first, last = max(start - position, 0), min(end - position, batch.num_rows)
        if first < last:
            yield batch.slice(first, last - first)
        position += batch.num_rows
        if position >= end:
            return


def rows_of(
    batches: Iterable[pa.RecordBatch], *, text_column: str, id_column: str | None
) -> Iterator[RawRow]:
    """The rows of the batches, one at a time."""
    for batch in batches:
        texts = _values(batch.column(text_column))
        if id_column is None:
            yield from map(RawRow, texts)
            continue
        ids = batch.column(id_column)
        written = _values(ids if _is_string(ids.type) else ids.cast(pa.large_string()))
        yield from map(RawRow, texts, written)


def _values(strings: pa.Array) -> Iterator[bytes | TooLong | None]:
    """The values. Those of a dictionary come one by one: expanded, they may be very large."""
    # — as bytes: Arrow does not check that a string column holds UTF-8, and its to_pylist() would
    #   raise for the whole batch where one row does not
    if not types.is_dictionary(strings.type):
        binary = strings.cast(pa.large_binary())
        yield from binary.to_pylist() if binary.nbytes <= BATCH_BYTES else map(_value, binary)
        return
    values = strings.dictionary.cast(pa.large_binary())
    for index in strings.indices:
        yield _value(values[index.as_py()]) if index.is_valid else None


def _value(scalar: pa.LargeBinaryScalar) -> bytes | TooLong | None:
    if scalar.is_valid and scalar.as_buffer().size > MAX_ROW_BYTES:
        return TooLong()
    value: bytes | None = scalar.as_py()
    return value


def _is_string(kind: pa.DataType) -> bool:
    if types.is_dictionary(kind):
        return _is_string(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
