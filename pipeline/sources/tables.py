"""Parquet, Arrow and Lance input: its units for the cut, and the rows of a piece.

Entry points: `table_units`, `table_rows` and `opened_table`. Parquet is cut from its footer alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from pipeline.errors import Problem, SpecError
from pipeline.sources.documents import MAX_ROW_BYTES, Names, Row, TooLong
from pipeline.sources.id_text import id_text, plain_values
from pipeline.sources.lance_dataset import fragment_at, fragment_batches, fragment_unit
from pipeline.sources.shards import ObjectVersion, Shard, Unit, check_columns
from pipeline.sources.streams import BLOCK_BYTES, MAX_IDLE, Fetched, Options, continued, opened
from pipeline.sources.views import View, view_of

TABLES = ("parquet", "arrow", "lance")  # the formats whose rows all have the same columns
FILE_MAGIC = b"ARROW1"
# Few rows at a time: while its texts are decoded, a batch is held three times.
BATCH_ROWS = 256
# Fewer rows where many rows may share one stored value. Above this size, the values of a batch
# become Python objects one by one; below, all at once.
BATCH_BYTES = 64 * 1024 * 1024
_STRINGS = (pa.string(), pa.large_string(), pa.string_view())
_BYTES = (pa.binary(), pa.large_binary(), pa.binary_view())
SHARED_VALUES = {"PLAIN_DICTIONARY", "RLE_DICTIONARY", "DELTA_BYTE_ARRAY"}
# The start of a dictionary page of Parquet, in Thrift's compact protocol: its kind, and then its
# uncompressed and its compressed size.
_DICTIONARY_PAGE = re.compile(rb"\x15\x04" + rb"\x15([\x80-\xff]{,4}[\x00-\x7f])" * 2)
_PAGE_START_BYTES = 14  # at most


@dataclass(frozen=True, slots=True)
class Table:
    """Some rows of an open table."""

    schema: pa.Schema  # of the object
    # Reads these columns (None: all) of the rows, batch by batch as they are asked for.
    batches: Callable[[Names], Iterator[pa.RecordBatch]]
    codecs: Mapping[str, str] = field(default_factory=dict)  # of Parquet, by leaf column


def table_units(version: ObjectVersion, options: Options) -> Iterator[Unit]:
    """Row groups or record batches, with the text column's uncompressed size.

    The batches of Arrow are read, because their row counts are stored in them alone.
    """
    columns = [name for name in (version.text_column, version.image_column) if name is not None]
    if version.format == "arrow":
        with opened(version.path, options) as file:
            arrow = _arrow_reader(file)
            _check_types(version, arrow.schema)
            for batch in arrow.batches():
                yield Unit(batch.num_rows, sum(batch.column(name).nbytes for name in columns))
        return
    if version.format == "lance":
        fragment, schema = fragment_at(version, options)
        _check_types(version, schema)
        yield fragment_unit(fragment, version.path, columns)
        return
    schema, footer = _footer(version, options)
    view = view_of(version)
    _check_types(version, view.schema(schema))
    paths = [footer.schema.column(leaf).path for leaf in range(footer.num_columns)]
    in_file = [view.names.get(name, name) for name in columns]
    leaves = [i for i, path in enumerate(paths) if _is_of(path, in_file)]
    for index, rows in enumerate(_group_rows(footer, view)):
        group = footer.row_group(index)
        sizes = (group.column(leaf).total_uncompressed_size for leaf in leaves)
        yield Unit(rows, sum(sizes) * rows // max(1, group.num_rows))


def table_rows(shard: Shard, options: Options, names: Names) -> Iterator[Row]:
    """The shard's rows, one at a time; without names, all columns but those of bytes and lists.

    Strings are bytes, as are texts of any type; other values are as of `plain_values`; images are
    bytes, or paths as strings.
    """
    with opened_table(shard, options) as table:
        count, version = table.schema.names.count, shard.version
        of_column = {
            version.text_column: partial(map, _value),
            version.image_column: partial(map, _image),
        }
        read = [name for name in dict.fromkeys(names or ()) if count(name)]
        if names is None:
            read = [
                field.name for field in table.schema if _is_shown(field) and count(field.name) == 1
            ]
        for batch in table.batches(read):
            named = zip(read, map(batch.column, read), strict=True)
            columns = [of_column.get(name, _values)(column) for name, column in named]
            # — the caller may read only columns that the file lacks
            rows = zip(*columns, strict=True) if read else repeat((), batch.num_rows)
            for values in rows:
                yield Row(dict(zip(read, values, strict=True)))


@contextmanager
def opened_table(shard: Shard, options: Options) -> Iterator[Table]:
    """The rows of a shard whose format is one of TABLES."""
    start, end = shard.piece.start_row, shard.piece.end_row
    if shard.version.format == "arrow":
        with continued(shard.version, options, start, _arrow_reader) as arrow:
            yield Table(arrow.schema, partial(_selected, arrow.between(start, end)))
        return
    if shard.version.format == "lance":
        fragment, schema = fragment_at(shard.version, options)
        yield Table(schema, partial(fragment_batches, fragment, shard))
        return
    schema, footer = _footer(shard.version, options)
    view = view_of(shard.version)
    batches = partial(view.batches, partial(_parquet_batches, shard, options, footer), schema)
    yield Table(view.schema(schema), batches, _codecs(footer) if view.has_own_columns else {})


def _selected(batches: Iterable[pa.RecordBatch], columns: Names) -> Iterator[pa.RecordBatch]:
    return (batch if columns is None else batch.select(columns) for batch in batches)


# The schemas and footers that were read last: each shard of a file needs those of the file.
_footers: dict[object, tuple[pa.Schema, pq.FileMetaData]] = {}


def _footer(version: ObjectVersion, options: Options) -> tuple[pa.Schema, pq.FileMetaData]:
    key = version, repr(options)
    footer = _footers.get(key)
    if footer is None:
        with opened(version.path, options, ahead=False) as file, pq.ParquetFile(file) as parquet:
            footer = parquet.schema_arrow, parquet.metadata
        if version.etag:  # — else the file may have changed
            _footers[key] = footer
        for oldest in tuple(_footers)[:-MAX_IDLE]:
            _footers.pop(oldest, None)
    return footer


def _parquet_batches(
    shard: Shard, options: Options, footer: pq.FileMetaData, columns: Names
) -> Iterator[pa.RecordBatch]:
    """The shard's rows in small batches."""
    start, end = shard.piece.start_row, shard.piece.end_row
    view = view_of(shard.version)
    group, first_row = _group_of(_group_rows(footer, view), start)
    make = partial(
        _parquet_reader, footer=footer, first=group, first_row=first_row, columns=columns, view=view
    )
    with continued(
        shard.version, options, start, make, columns=columns, ahead=False, first=first_row
    ) as reader:
        yield from reader.between(start, end)


def _group_rows(footer: pq.FileMetaData, view: View) -> list[int]:
    """The number of rows in each row group, without the deleted ones."""
    sizes = [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]
    return view.live_rows(sizes) if len(view.deleted) else sizes


def _group_of(group_rows: Sequence[int], row: int) -> tuple[int, int]:
    """The row group with this row, and its first row."""
    group = first_row = 0
    while group < len(group_rows) and first_row + group_rows[group] <= row:
        first_row += group_rows[group]
        group += 1
    return group, first_row


def _parquet_reader(
    file: Fetched,
    *,
    footer: pq.FileMetaData,
    first: int,
    first_row: int,
    columns: Names,
    view: View,
) -> _BatchReader:
    """Reads from the row group `first` on. One buffer a column is held, and no group."""
    # — with `pre_buffer`, a group's whole column would be fetched before its first row
    parquet = pq.ParquetFile(file, metadata=footer, buffer_size=BLOCK_BYTES, pre_buffer=False)

    def batches() -> Iterator[pa.RecordBatch]:
        # — one group at a time: a batch across two groups is lost when the second is broken
        start = sum(footer.row_group(index).num_rows for index in range(first))
        for index in range(first, footer.num_row_groups):
            group = footer.row_group(index)
            rows = _batch_rows(file, group, columns)
            read = parquet.iter_batches(
                rows, row_groups=[index], columns=columns, use_threads=False
            )
            complete = _complete(read, group.num_rows)
            yield from view.live(complete, start) if len(view.deleted) else complete
            start += group.num_rows

    return _BatchReader(file, parquet.schema_arrow, batches(), first_row)


class _BatchReader:
    """The batches of a file, read forwards."""

    def __init__(
        self, file: Fetched, schema: pa.Schema, batches: Iterator[pa.RecordBatch], position: int = 0
    ) -> None:
        self.file, self.schema = file, schema
        self.position = position  # the first row of the batch that was read last
        self._batches = batches
        self._batch: pa.RecordBatch | None = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The batch that was read last, if any, and those after it."""
        if self._batch is not None:
            yield self._batch
        for batch in self._batches:
            self.position += 0 if self._batch is None else self._batch.num_rows
            self._batch = batch
            yield batch

    def between(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Rows `start` to before `end` of the file, in batches. No later batch is read."""
        for batch in self.batches():
            first, last = start - self.position, min(end - self.position, batch.num_rows)
            if max(first, 0) < last:
                yield batch.slice(max(first, 0), last - max(first, 0))
            if self.position + batch.num_rows >= end:
                return


def _arrow_reader(file: Fetched) -> _BatchReader:
    """Reads an Arrow file or stream. Its first bytes show which it is."""
    is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
    file.seek(0)
    reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
    indexes = range(reader.num_record_batches) if is_file else ()
    batches = map(reader.get_batch, indexes) if is_file else iter(reader)
    return _BatchReader(file, reader.schema, batches)


def _check_types(version: ObjectVersion, schema: pa.Schema) -> None:
    """SpecError unless each column that is read has values of a type that it may have."""
    check_columns(version, schema.names)
    columns = (
        ("image", version.image_column, _may_be_image, "name a column of bytes or of paths"),
        ("text", version.text_column, _may_be_text, "name a column of strings"),
        ("id", version.id_column, _may_be_id, "name a column of strings or numbers, or none"),
    )
    for key, name, may_be, fix in columns:
        if name is not None and not may_be(kind := schema.field(name).type):
            cast = f'SELECT * REPLACE (CAST("{name}" AS VARCHAR) AS "{name}")'
            fix = f"{version.path} has {kind} there; {fix}, or write a copy with it cast: {cast}"
            raise SpecError([Problem(f"input.{key}", fix, name)])


def _complete(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The batches; OSError after the last if they hold fewer rows than the footer states."""
    read = 0
    for batch in batches:
        read += batch.num_rows
        yield batch
    if read < rows:
        raise OSError(f"its footer has {rows} rows, and its pages have {read}")


def _batch_rows(file: Fetched, group: pq.RowGroupMetaData, columns: Names) -> int:
    """Rows in a batch, bounded in memory even if each row has the longest value of its chunk.

    A dictionary, or a prefix shared by neighbours, stores one value for many rows. Such a value is
    at most as long as the dictionary, or as the whole column chunk.
    """
    longest = 0
    for index in range(group.num_columns):
        chunk = group.column(index)
        is_read = columns is None or _is_of(chunk.path_in_schema, columns)
        if is_read and chunk.physical_type == "BYTE_ARRAY":
            size = chunk.total_uncompressed_size
            average = size // max(1, group.num_rows)
            longest += min(size, average + _longest_shared(file, chunk))
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, longest)))


def _longest_shared(file: Fetched, chunk: pq.ColumnChunkMetaData) -> int:
    """A bound on the bytes of a value of the chunk that is stored once for several rows."""
    if SHARED_VALUES.isdisjoint(chunk.encodings):
        return 0
    size: int = chunk.total_uncompressed_size
    if "DELTA_BYTE_ARRAY" in chunk.encodings or size <= BATCH_BYTES // BATCH_ROWS:
        return size  # — so small that its dictionary is not worth a request
    starts = chunk.dictionary_page_offset or 0, chunk.data_page_offset
    file.seek(min((start for start in starts if start > 0), default=0))  # — as Arrow does
    page = _DICTIONARY_PAGE.match(file.read(_PAGE_START_BYTES))
    return size if page is None else max(map(_thrift_integer, page.groups()))


def _thrift_integer(encoded: bytes) -> int:
    """A number that is not negative: groups of 7 bits, the lowest first, of twice the number."""
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(encoded)) >> 1


def _is_of(path: str, columns: Iterable[str]) -> bool:
    """Whether a leaf of Parquet is one of the columns, whose names may have dots, or inside one."""
    return any(path == name or path.startswith(f"{name}.") for name in columns)


def _codecs(footer: pq.FileMetaData) -> dict[str, str]:
    """By leaf column, the codec of its first row group."""
    if not footer.num_row_groups:
        return {}
    group = footer.row_group(0)
    columns = (group.column(index) for index in range(group.num_columns))
    codecs = {column.path_in_schema: column.compression for column in columns}
    return {path: "none" if codec == "UNCOMPRESSED" else codec for path, codec in codecs.items()}


def _values(column: pa.Array) -> Iterator[object]:
    """The values, strings as bytes."""
    return map(_value, column) if _is_string(column.type) else iter(plain_values(column))


def _value(scalar: pa.Scalar) -> bytes | TooLong | None:
    """The bytes of a string or of bytes.

    One by one, because many rows may share one long value, and Arrow does not check that a string
    is UTF-8.
    """
    while isinstance(scalar, pa.DictionaryScalar | pa.ExtensionScalar):
        scalar = scalar.value
    if scalar is None or not scalar.is_valid:
        return None
    data = scalar.as_buffer()
    return TooLong() if data.size > MAX_ROW_BYTES else data.to_pybytes()


def _image(scalar: pa.Scalar) -> object:
    """Bytes, a path as a string, or what the struct of both has that `datasets` writes."""
    if isinstance(scalar, pa.StructScalar):
        names = [field.name for field in scalar.type] if scalar.is_valid else ()
        parts = (_image(scalar[name]) for name in ("bytes", "path") if name in names)
        return next((part for part in parts if part is not None), None)
    value = _value(scalar)
    is_path = isinstance(value, bytes) and _is_string(scalar.type)
    return id_text(value) if is_path else value


def _may_be_image(kind: pa.DataType) -> bool:
    if types.is_struct(kind):
        parts = [field.type for field in kind if field.name in ("bytes", "path")]
        return bool(parts) and all(map(_may_be_image, parts))
    return _may_be_text(kind)


def _may_be_text(kind: pa.DataType) -> bool:
    """Whether values are strings, or bytes that may be UTF-8; in one of many files, all null."""
    stored = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    value_type = stored.value_type if types.is_dictionary(stored) else stored
    return value_type in (*_STRINGS, *_BYTES, pa.null())


def _may_be_id(kind: pa.DataType) -> bool:
    return not types.is_nested(kind.value_type if types.is_dictionary(kind) else kind)


def _is_string(kind: pa.DataType) -> bool:
    return (kind.value_type if types.is_dictionary(kind) else kind) in _STRINGS


def _is_shown(column: pa.Field) -> bool:
    return not types.is_nested(column.type) and column.type not in _BYTES
