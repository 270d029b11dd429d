"""Parquet input: its pieces from the footer alone, and the record batches of some rows.

Entry points: `parquet_pieces`, `opened_parquet`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.sources.columns import Batches, batches_between, check_columns
from pipeline.sources.shards import Piece, Unit, cut_units
from pipeline.sources.streams import BLOCK_BYTES, Options, opened

# Few rows at a time: while its texts are decoded, a batch is held three times.
BATCH_ROWS = 256
# Fewer rows where one stored value may stand for many rows.
BATCH_BYTES = 64 * 1024 * 1024
SHARED_VALUES = {"PLAIN_DICTIONARY", "RLE_DICTIONARY", "DELTA_BYTE_ARRAY"}


def parquet_pieces(
    path: str, options: Options, *, text_column: str, id_column: str | None, target_bytes: int
) -> list[Piece]:
    """Row groups, joined or split; the text column's uncompressed size is its bytes of text."""
    with opened(path, options) as file, pq.ParquetFile(file) as parquet:
        check_columns(path, parquet.schema_arrow, text_column=text_column, id_column=id_column)
        return list(cut_units(_row_groups(parquet, text_column), target_bytes))


@contextmanager
def opened_parquet(
    path: str, options: Options, piece: Piece, columns: Sequence[str] | None = None
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
        within = batches_between(
            _complete(batches, rows), piece.start_row - first_row, piece.end_row - first_row
        )
        yield Batches(parquet.schema_arrow, within, _codecs(parquet))


def _row_groups(parquet: pq.ParquetFile, text_column: str) -> Iterator[Unit]:
    metadata = parquet.metadata
    paths = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
    text_leaf = paths.index(text_column)
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        yield Unit(group.num_rows, group.column(text_leaf).total_uncompressed_size)


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
