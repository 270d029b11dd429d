"""Some of a shard's rows as Parquet or Arrow IPC, with every column and the schema as they were.

Knows writers, codecs and record batches. Knows nothing of why a row is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.data.arrow import opened_batches
from pipeline.data.parquet import batch_rows, overlapping
from pipeline.data.shards import Shard
from pipeline.data.streams import BLOCK_BYTES, Options, opened

# So much is gathered for one row group: a shard's text fits, and a wide row's other columns do not
# all lie in memory.
ROW_GROUP_BYTES = 128 * 1024 * 1024


def kept_parquet(shard: Shard, options: Options, keep: NDArray[np.bool_]) -> bytes:
    """A Parquet file of the rows; each column has the codec that it had."""
    with (
        opened(shard.path, options) as file,
        pq.ParquetFile(file, buffer_size=BLOCK_BYTES) as parquet,
    ):
        first_row, groups = overlapping(parquet, shard.piece.start_row, shard.piece.end_row)
        leaves = [parquet.schema.column(i).path for i in range(len(parquet.schema))]
        rows_at_once = batch_rows(file, parquet, groups, leaves)
        batches = (
            batch
            for group in groups
            for batch in parquet.iter_batches(rows_at_once, row_groups=[group], use_threads=False)
        )
        sink = pa.BufferOutputStream()
        schema, codecs = parquet.schema_arrow, _codecs(parquet)
        with pq.ParquetWriter(sink, schema, compression=codecs, version="2.6") as writer:
            kept = kept_batches(batches, shard.piece.start_row - first_row, keep)
            for table in _gathered(kept, schema):
                writer.write_table(table, row_group_size=max(1, table.num_rows))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def kept_arrow(shard: Shard, options: Options, keep: NDArray[np.bool_]) -> bytes:
    """An Arrow file, or a stream where it was one, of the rows."""
    sink = pa.BufferOutputStream()
    with opened_batches(shard.path, options) as arrow:
        new = pa.ipc.new_file if arrow.is_file else pa.ipc.new_stream
        with new(sink, arrow.schema) as writer:
            for batch in kept_batches(arrow.batches, shard.piece.start_row, keep):
                writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def kept_batches(
    batches: Iterable[pa.RecordBatch],
    before: int,  # rows of the batches that lie before the shard
    keep: NDArray[np.bool_],  # [rows of the shard]
) -> Iterator[pa.RecordBatch]:
    """The batches' rows that are kept; nothing after the last of them is asked for."""
    wanted = np.flatnonzero(keep)
    end = int(wanted[-1]) + 1 if len(wanted) else 0
    position = -before  # in the shard, of a batch's first row
    if not end:
        return
    for batch in batches:
        first, last = max(-position, 0), min(end - position, batch.num_rows)
        if first < last:
            mask = keep[position + first : position + last]
            if mask.any():
                yield batch.slice(first, last - first).filter(pa.array(mask))
        position += batch.num_rows
        if position >= end:
            return


def _gathered(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """The batches joined, each time that there is enough for a row group."""
    held: list[pa.RecordBatch] = []
    size_bytes = 0
    for batch in batches:
        held.append(batch)
        size_bytes += batch.nbytes
        if size_bytes >= ROW_GROUP_BYTES:
            yield pa.Table.from_batches(held, schema)
            held, size_bytes = [], 0
    if held:
        yield pa.Table.from_batches(held, schema)


def _codecs(parquet: pq.ParquetFile) -> dict[str, str] | str:
    """By leaf column, the codec of its first row group."""
    if not parquet.metadata.num_row_groups:
        return "snappy"
    group = parquet.metadata.row_group(0)
    columns = (group.column(index) for index in range(group.num_columns))
    codecs = {column.path_in_schema: column.compression for column in columns}
    return {path: "none" if codec == "UNCOMPRESSED" else codec for path, codec in codecs.items()}
