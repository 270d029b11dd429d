"""Parquet input: its pieces from the footer alone, and the rows of one piece.

Knows row groups. Knows nothing of shards' identity or of what becomes of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.sources.columns import check_columns, rows_between
from pipeline.sources.documents import RawRow
from pipeline.sources.shards import Piece, Shard, Unit, cut_units
from pipeline.sources.streams import BLOCK_BYTES, Fetched, Options, opened

# Few rows at a time: a batch is held three times over while its texts are decoded.
BATCH_ROWS = 256
# Fewer still where a dictionary, or prefixes shared by neighbours, may make much text of little.
BATCH_BYTES = 64 * 1024 * 1024
_PAGE_HEADER_BYTES = 16
_DICTIONARY_PAGE = 2
_NEXT_I32 = 0x15  # in Thrift: the next field, a 32-bit integer


def parquet_pieces(
    path: str, options: Options, *, text_column: str, id_column: str | None, target_bytes: int
) -> list[Piece]:
    """Row groups, joined or split; the text column's uncompressed size is its bytes of text."""
    with opened(path, options) as file, pq.ParquetFile(file) as parquet:
        check_columns(path, parquet.schema_arrow, text_column=text_column, id_column=id_column)
        return list(cut_units(_row_groups(parquet, text_column), target_bytes))


def parquet_schema(path: str, options: Options) -> pa.Schema:
    """The object's columns, by its footer."""
    with opened(path, options) as file, pq.ParquetFile(file) as parquet:
        return parquet.schema_arrow


def parquet_rows(shard: Shard, options: Options) -> Iterator[RawRow]:
    """The shard's rows; only the row groups that hold some of them, and two columns, are read."""
    # — buffered: otherwise a row group's whole text column is fetched before its first row is seen
    with (
        opened(shard.path, options) as file,
        pq.ParquetFile(file, buffer_size=BLOCK_BYTES) as parquet,
    ):
        first_row, groups = overlapping(parquet, shard.piece.start_row, shard.piece.end_row)
        columns = [shard.version.text_column]
        columns += [shard.version.id_column] if shard.version.id_column else []
        rows_at_once = batch_rows(file, parquet, groups, columns)
        # — one group at a time: a batch across two would lose the first with a broken second
        batches = (
            batch
            for group in groups
            for batch in parquet.iter_batches(
                rows_at_once, row_groups=[group], columns=columns, use_threads=False
            )
        )
        rows = sum(parquet.metadata.row_group(group).num_rows for group in groups)
        yield from rows_between(
            _whole(batches, rows),
            shard.piece.start_row - first_row,
            shard.piece.end_row - first_row,
            text_column=shard.version.text_column,
            id_column=shard.version.id_column,
        )


def _row_groups(parquet: pq.ParquetFile, text_column: str) -> Iterator[Unit]:
    metadata = parquet.metadata
    text_leaf = _leaf(parquet, text_column)
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        yield Unit(group.num_rows, group.column(text_leaf).total_uncompressed_size)


def _whole(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The batches; OSError behind them if they hold fewer rows than the footer says."""
    found = 0
    for batch in batches:
        found += batch.num_rows
        yield batch
    if found < rows:
        raise OSError(f"its footer tells of {rows} rows where its pages hold {found}")


def _leaf(parquet: pq.ParquetFile, column: str) -> int:
    metadata = parquet.metadata
    paths = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
    return paths.index(column)


def batch_rows(
    file: Fetched, parquet: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str]
) -> int:
    """So few rows that a batch is bounded even if each row is the longest value there can be."""
    leaves = [_leaf(parquet, column) for column in columns]
    row_groups = [parquet.metadata.row_group(group) for group in groups]
    longest = max(
        (sum(_value_bytes(file, group.column(leaf)) for leaf in leaves) for group in row_groups),
        default=0,  # the file is another than was cut
    )
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, longest)))


def _value_bytes(file: Fetched, chunk: pq.ColumnChunkMetaData) -> int:
    """The most that one value can take of those that are stored once for many rows; 0 for none."""
    all_pages: int = chunk.total_uncompressed_size
    if "DELTA_BYTE_ARRAY" in chunk.encodings:
        return all_pages
    # — the footer tells only how large all pages are, the first one's header how large it is
    file.seek(min(at for at in (chunk.dictionary_page_offset, chunk.data_page_offset) if at))
    fields = iter(file.read(_PAGE_HEADER_BYTES))
    kind, size_bytes = _integer_field(fields), _integer_field(fields)
    if kind is None or size_bytes is None:
        return all_pages
    return size_bytes if kind == _DICTIONARY_PAGE else 0


def _integer_field(data: Iterator[int]) -> int | None:
    """The next field of Thrift's compact form, if it is a natural number.

    Seven bits a byte, the lowest first; of the number they make, the lowest bit is the sign.
    """
    if next(data, None) != _NEXT_I32:
        return None
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return None if value & 1 else value >> 1
    return None


def overlapping(parquet: pq.ParquetFile, start_row: int, end_row: int) -> tuple[int, list[int]]:
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
