"""Parquet and Arrow input: its units for the cut, and the rows of a piece.

Entry points: `table_units`, `table_rows` and `opened_table`. Parquet is cut from its footer alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from pipeline.errors import Problem, SpecError
from pipeline.sources.documents import MAX_ROW_BYTES, RawRow, TooLong
from pipeline.sources.shards import ObjectVersion, Piece, Shard, Unit, check_columns
from pipeline.sources.streams import BLOCK_BYTES, Options, opened

TABLES = ("parquet", "arrow")  # the formats whose rows all have the same columns
FILE_MAGIC = b"ARROW1"
# Few rows at a time: while its texts are decoded, a batch is held three times.
BATCH_ROWS = 256
# Fewer rows where one stored value may stand for many rows. Above this size, the values of a batch
# become Python objects one by one; below, all at once.
BATCH_BYTES = 64 * 1024 * 1024
SHARED_VALUES = {"PLAIN_DICTIONARY", "RLE_DICTIONARY", "DELTA_BYTE_ARRAY"}


@dataclass(frozen=True, slots=True)
class Batches:
    """Some rows of an open table, read batch by batch as they are asked for."""

    schema: pa.Schema  # of the object; the batches may have fewer columns
    batches: Iterator[pa.RecordBatch]
    codecs: Mapping[str, str] = field(default_factory=dict)  # of Parquet, by leaf column


def table_units(version: ObjectVersion, options: Options) -> Iterator[Unit]:
    """Row groups or record batches, with the text column's uncompressed size.

    The batches of Arrow are read: only they know their row counts.
    """
    if version.format == "arrow":
        with _all_batches(version.path, options) as arrow:
            _check_types(version, arrow.schema)
            for batch in arrow.batches:
                yield Unit(batch.num_rows, batch.column(version.text_column).nbytes)
        return
    with opened(version.path, options) as file, pq.ParquetFile(file) as parquet:
        _check_types(version, parquet.schema_arrow)
        metadata = parquet.metadata
        paths = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
        text_leaf = paths.index(version.text_column)
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            yield Unit(group.num_rows, group.column(text_leaf).total_uncompressed_size)


def table_rows(shard: Shard, options: Options) -> Iterator[RawRow]:
    """The shard's rows, one at a time."""
    text_column, id_column = shard.version.text_column, shard.version.id_column
    with opened_table(shard, options, [text_column, *filter(None, [id_column])]) as table:
        for batch in table.batches:
            texts = _values(batch.column(text_column))
            if id_column is None:
                yield from map(RawRow, texts)
                continue
            ids = batch.column(id_column)
            written = _values(ids if _is_string(ids.type) else ids.cast(pa.large_string()))
            yield from map(RawRow, texts, written)


def opened_table(
    shard: Shard, options: Options, columns: Sequence[str] | None = None
) -> AbstractContextManager[Batches]:
    """The rows of a shard whose format is one of TABLES, with these columns (None: all)."""
    open_batches = opened_parquet if shard.version.format == "parquet" else _opened_arrow
    return open_batches(shard.path, options, shard.piece, columns)


@contextmanager
def opened_parquet(
    path: str, options: Options, piece: Piece, columns: Sequence[str] | None
) -> Iterator[Batches]:
    """The rows of the piece, with these columns (None: all), in small batches."""
    # — buffered: without a buffer, a row group's whole column is fetched before its first row
    with (
        opened(path, options) as file,
        pq.ParquetFile(file, buffer_size=BLOCK_BYTES) as parquet,
    ):
        first_row, groups = _overlapping(parquet, piece.start_row, piece.end_row)
        rows_at_once = _batch_rows(parquet, groups, columns)
        # — one group at a time: a batch across two groups is lost when the second is broken
        batches = (
            batch
            for group in groups
            for batch in parquet.iter_batches(
                rows_at_once, row_groups=[group], columns=columns, use_threads=False
            )
        )
        rows = sum(parquet.metadata.row_group(group).num_rows for group in groups)
        within = _batches_between(
            _complete(batches, rows), piece.start_row - first_row, piece.end_row - first_row
        )
        yield Batches(parquet.schema_arrow, within, _codecs(parquet))


@contextmanager
def _opened_arrow(
    path: str, options: Options, piece: Piece, columns: Sequence[str] | None
) -> Iterator[Batches]:
    with _all_batches(path, options) as arrow:
        within = _batches_between(arrow.batches, piece.start_row, piece.end_row)
        chosen = within if columns is None else (batch.select(list(columns)) for batch in within)
        yield Batches(arrow.schema, chosen)


@contextmanager
def _all_batches(path: str, options: Options) -> Iterator[Batches]:
    """All batches of an Arrow file or stream. Its first bytes show which of them it is."""
    with opened(path, options) as file:
        is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
        file.seek(0)
        if not is_file:
            with pa.ipc.open_stream(file) as stream:
                yield Batches(stream.schema, iter(stream))
            return
        with pa.ipc.open_file(file) as reader:
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            yield Batches(reader.schema, batches)


def _check_types(version: ObjectVersion, schema: pa.Schema) -> None:
    """SpecError unless the text column has strings, and the id column strings or numbers."""
    check_columns(version, schema.names)
    text_type = schema.field(version.text_column).type
    if not _is_string(text_type):
        fix = f"{version.path} has {text_type} there, not strings; name a string column"
        raise SpecError([Problem("input.text", fix, version.text_column)])
    id_type = schema.field(version.id_column).type if version.id_column else pa.string()
    if not (_is_string(id_type) or types.is_primitive(id_type)):
        fix = f"{version.path} has {id_type} there; name a column of strings or numbers, or none"
        raise SpecError([Problem("input.id", fix, version.id_column)])


def _batches_between(
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


def _complete(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The batches; OSError after the last if they hold fewer rows than the footer says."""
    read = 0
    for batch in batches:
        read += batch.num_rows
        yield batch
    if read < rows:
        raise OSError(f"its footer says {rows} rows, and its pages hold {read}")


def _batch_rows(
    parquet: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str] | None
) -> int:
    """Rows in a batch, bounded in memory even if each row has the longest value of its chunk.

    A dictionary, or a prefix shared by neighbours, stores one value for many rows. Such a value is
    at most as long as its whole column chunk.
    """
    longest = 0
    for group in groups:
        metadata = parquet.metadata.row_group(group)
        leaves = (metadata.column(leaf) for leaf in range(metadata.num_columns))
        longest = max(longest, sum(_value_bytes(leaf, columns) for leaf in leaves))
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, longest)))


def _value_bytes(chunk: pq.ColumnChunkMetaData, columns: Sequence[str] | None) -> int:
    """An upper bound for one value that may be stored once for many rows; 0 where none is."""
    if columns is not None and chunk.path_in_schema not in columns:
        return 0
    if chunk.physical_type != "BYTE_ARRAY" or SHARED_VALUES.isdisjoint(chunk.encodings):
        return 0
    size_bytes: int = chunk.total_uncompressed_size
    return size_bytes


def _overlapping(parquet: pq.ParquetFile, start_row: int, end_row: int) -> tuple[int, list[int]]:
    """The first row of the row groups that hold some of the rows, and these groups."""
    groups: list[int] = []
    first_row = row = 0
    for index in range(parquet.metadata.num_row_groups):
        next_row = row + parquet.metadata.row_group(index).num_rows
        if start_row < next_row and row < end_row:
            first_row = first_row if groups else row
            groups.append(index)
        row = next_row
    return first_row, groups


def _codecs(parquet: pq.ParquetFile) -> dict[str, str]:
    """By leaf column, the codec of its first row group."""
    if not parquet.metadata.num_row_groups:
        return {}
    group = parquet.metadata.row_group(0)
    columns = (group.column(index) for index in range(group.num_columns))
    codecs = {column.path_in_schema: column.compression for column in columns}
    return {path: "none" if codec == "UNCOMPRESSED" else codec for path, codec in codecs.items()}


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
