"""Parquet input: its pieces from the footer alone, and the rows of one piece.

Knows row groups. Knows nothing of shards' identity or of what becomes of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow.parquet as pq

from pipeline.data.columns import check_columns, rows_between
from pipeline.data.documents import RawRow
from pipeline.data.shards import Piece, Shard, Unit, cut_units
from pipeline.data.streams import BLOCK_BYTES, Options, opened

# Few rows at a time: a batch is held three times over while its texts are decoded.
BATCH_ROWS = 256


def parquet_pieces(
    path: str, options: Options, *, text_column: str, id_column: str | None, target_bytes: int
) -> list[Piece]:
    """Row groups, joined or split; the text column's uncompressed size is its bytes of text."""
    with opened(path, options) as file, pq.ParquetFile(file) as parquet:
        check_columns(path, parquet.schema_arrow, text_column=text_column, id_column=id_column)
        return list(cut_units(_row_groups(parquet, text_column), target_bytes))


def parquet_rows(shard: Shard, options: Options) -> Iterator[RawRow]:
    """The shard's rows; only the row groups that hold some of them, and two columns, are read."""
    # — buffered: otherwise a row group's whole text column is fetched before its first row is seen
    with (
        opened(shard.path, options) as file,
        pq.ParquetFile(file, buffer_size=BLOCK_BYTES) as parquet,
    ):
        first_row, groups = _overlapping(parquet, shard.piece.start_row, shard.piece.end_row)
        batches = parquet.iter_batches(
            BATCH_ROWS,
            row_groups=groups,
            columns=[shard.version.text_column]
            + ([shard.version.id_column] if shard.version.id_column else []),
            use_threads=False,
        )
        yield from rows_between(
            batches,
            shard.piece.start_row - first_row,
            shard.piece.end_row - first_row,
            text_column=shard.version.text_column,
            id_column=shard.version.id_column,
        )


def _row_groups(parquet: pq.ParquetFile, text_column: str) -> Iterator[Unit]:
    metadata = parquet.metadata
    paths = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
    text_leaf = paths.index(text_column)
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        yield Unit(group.num_rows, group.column(text_leaf).total_uncompressed_size)


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
