"""Parquet and Arrow input: its units for the cut, and the rows of a piece.

Entry points: `table_units`, `table_rows` and `opened_table`. Parquet is cut from its footer alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from pipeline.errors import Problem, SpecError
from pipeline.sources.documents import MAX_ROW_BYTES, RawRow, TooLong, id_text
from pipeline.sources.shards import ObjectVersion, Shard, Unit, check_columns
from pipeline.sources.streams import BLOCK_BYTES, Fetched, Options, continued, opened

TABLES = ("parquet", "arrow")  # the formats whose rows all have the same columns
FILE_MAGIC = b"ARROW1"
# Few rows at a time: while its texts are decoded, a batch is held three times.
BATCH_ROWS = 256
# Fewer rows where many rows may share one stored value. Above this size, the values of a batch
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
        with opened(version.path, options) as file:
            arrow = _ArrowReader(file)
            _check_types(version, arrow.schema)
            for batch in arrow.batches():
                read = filter(None, (version.text_column, version.image_column))
                yield Unit(batch.num_rows, sum(batch.column(name).nbytes for name in read))
        return
    with opened(version.path, options) as file, pq.ParquetFile(file) as parquet:
        _check_types(version, parquet.schema_arrow)
        metadata = parquet.metadata
        paths = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
        columns = version.text_column, version.image_column
        leaves = [i for i, path in enumerate(paths) if path.partition(".")[0] in columns]
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            sizes = (group.column(leaf).total_uncompressed_size for leaf in leaves)
            yield Unit(group.num_rows, sum(sizes))


def table_rows(shard: Shard, options: Options) -> Iterator[RawRow]:
    """The shard's rows, one at a time."""
    version = shard.version
    named = [version.text_column, version.id_column, version.image_column]
    with opened_table(shard, options, list(dict.fromkeys(filter(None, named)))) as table:
        for batch in table.batches:
            rows = batch.num_rows
            texts: Iterator[object] = repeat(None, rows)
            ids: Iterator[object] = repeat(None, rows)
            images: Iterator[object] = repeat(None, rows)
            if version.text_column is not None:
                texts = strings_of(batch.column(version.text_column))
            if version.id_column is not None:
                own = batch.column(version.id_column)
                ids = strings_of(own if is_string(own.type) else own.cast(pa.large_string()))
            if version.image_column is not None:
                images = _images(batch.column(version.image_column))
            rows_read = zip(texts, ids, images, strict=True)
            yield from (RawRow(text, id, image=image) for text, id, image in rows_read)


@contextmanager
def opened_table(
    shard: Shard, options: Options, columns: Sequence[str] | None = None
) -> Iterator[Batches]:
    """The rows of a shard whose format is one of TABLES, with these columns (None: all)."""
    start, end = shard.piece.start_row, shard.piece.end_row
    if shard.version.format == "arrow":
        with continued(shard.version, options, start, _ArrowReader) as arrow:
            at = arrow.position
            within = _batches_between(arrow.batches(), start - at, end - at)
            chosen = within if columns is None else (batch.select(columns) for batch in within)
            yield Batches(arrow.schema, chosen)
        return
    # — buffered: without a buffer, a row group's whole column is fetched before its first row
    with (
        opened(shard.path, options) as file,
        pq.ParquetFile(file, buffer_size=BLOCK_BYTES) as parquet,
    ):
        batches = _parquet_batches(parquet, start, end, columns)
        yield Batches(parquet.schema_arrow, batches, _codecs(parquet))


def _parquet_batches(
    parquet: pq.ParquetFile, start: int, end: int, columns: Sequence[str] | None
) -> Iterator[pa.RecordBatch]:
    """Rows `start` to before `end` in small batches."""
    next_row = 0
    # — one group at a time: a batch across two groups is lost when the second is broken
    for index in range(parquet.metadata.num_row_groups):
        group = parquet.metadata.row_group(index)
        first_row, next_row = next_row, next_row + group.num_rows
        if start < next_row and first_row < end:
            rows = _batch_rows(group, columns)
            batches = parquet.iter_batches(
                rows, row_groups=[index], columns=columns, use_threads=False
            )
            complete = _complete(batches, group.num_rows)
            yield from _batches_between(complete, start - first_row, end - first_row)


class _ArrowReader:
    """The batches of an Arrow file or stream, read forwards. Its first bytes show which it is."""

    def __init__(self, file: Fetched) -> None:
        self.file = file
        self.position = 0  # the first row of the batch that was read last
        is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
        file.seek(0)
        reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        self.schema = reader.schema
        indexes = range(reader.num_record_batches) if is_file else ()
        self._batches = map(reader.get_batch, indexes) if is_file else iter(reader)
        self._batch: pa.RecordBatch | None = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The batch that was read last, if any, and those after it."""
        if self._batch is not None:
            yield self._batch
        for batch in self._batches:
            self.position += 0 if self._batch is None else self._batch.num_rows
            self._batch = batch
            yield batch


def _check_types(version: ObjectVersion, schema: pa.Schema) -> None:
    """SpecError unless the text column has strings, and the id column strings or numbers."""
    check_columns(version, schema.names)
    image_type = schema.field(version.image_column).type if version.image_column else pa.binary()
    if not _may_be_image(image_type):
        fix = f"{version.path} has {image_type} there; name a column of bytes or of paths"
        raise SpecError([Problem("input.image", fix, version.image_column)])
    text_type = schema.field(version.text_column).type if version.text_column else pa.string()
    if not is_string(text_type):
        fix = f"{version.path} has {text_type} there, not strings; name a string column"
        raise SpecError([Problem("input.text", fix, version.text_column)])
    id_type = schema.field(version.id_column).type if version.id_column else pa.string()
    if not (is_string(id_type) or types.is_primitive(id_type)):
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


def _batch_rows(group: pq.RowGroupMetaData, columns: Sequence[str] | None) -> int:
    """Rows in a batch, bounded in memory even if each row has the longest value of its chunk.

    A dictionary, or a prefix shared by neighbours, stores one value for many rows. Such a value is
    at most as long as its whole column chunk.
    """
    longest = 0
    for index in range(group.num_columns):
        chunk = group.column(index)
        is_read = columns is None or chunk.path_in_schema.partition(".")[0] in columns
        shares_values = not SHARED_VALUES.isdisjoint(chunk.encodings)
        if is_read and chunk.physical_type == "BYTE_ARRAY":
            size = chunk.total_uncompressed_size
            longest += size if shares_values else size // max(1, group.num_rows)
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, longest)))


def _codecs(parquet: pq.ParquetFile) -> dict[str, str]:
    """By leaf column, the codec of its first row group."""
    if not parquet.metadata.num_row_groups:
        return {}
    group = parquet.metadata.row_group(0)
    columns = (group.column(index) for index in range(group.num_columns))
    codecs = {column.path_in_schema: column.compression for column in columns}
    return {path: "none" if codec == "UNCOMPRESSED" else codec for path, codec in codecs.items()}


def strings_of(strings: pa.Array) -> Iterator[bytes | TooLong | None]:
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


def _images(column: pa.Array) -> Iterator[object]:
    """Bytes, paths as strings, or the structs of both that `datasets` writes."""
    if types.is_struct(column.type):
        names = [field.name for field in column.type]
        parts = (column.field(names.index(n)) if n in names else None for n in ("bytes", "path"))
        data, paths = (pa.nulls(len(column), pa.binary()) if p is None else p for p in parts)
        pairs = zip(_images(data), _images(paths), strict=True)
        yield from (path if own is None else own for own, path in pairs)
    elif is_string(column.type):
        for value in strings_of(column):
            yield id_text(value) if isinstance(value, bytes) else value
    else:
        yield from map(_value, column.cast(pa.large_binary()))


def _may_be_image(kind: pa.DataType) -> bool:
    if types.is_struct(kind):
        parts = [field.type for field in kind if field.name in ("bytes", "path")]
        return bool(parts) and all(map(_may_be_image, parts))
    return is_bytes(kind) or is_string(kind)


def is_bytes(kind: pa.DataType) -> bool:
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _value(scalar: pa.LargeBinaryScalar) -> bytes | TooLong | None:
    if scalar.is_valid and scalar.as_buffer().size > MAX_ROW_BYTES:
        return TooLong()
    value: bytes | None = scalar.as_py()
    return value


def is_string(kind: pa.DataType) -> bool:
    if types.is_dictionary(kind):
        return is_string(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
