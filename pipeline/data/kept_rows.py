"""Some of a shard's rows, as a file of the shard's own format: the same columns, the same bytes.

Knows which writer a format has and reads back what was written. Knows nothing of why a row is kept.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.data.kept_records import joined_lines, kept_lines, kept_wet, records_in
from pipeline.data.kept_tables import kept_arrow, kept_parquet
from pipeline.data.shards import Shard
from pipeline.data.streams import Options, one_line, reading
from pipeline.errors import StorageError, UnreadableError

Keep = NDArray[np.bool_]  # [rows of the shard]


def kept_rows(shard: Shard, options: Options, keep: Keep) -> bytes:
    """A file of the rows that are kept, read back; StorageError where the file does not give them.

    Rows that are not kept need not be readable.
    """
    assert len(keep) == shard.rows, (len(keep), shard.rows)
    try:
        with reading(shard.path):
            data = _written(shard, options, keep)
    except UnreadableError as error:
        raise _lost(shard, keep, one_line(error.__cause__ or error)) from error
    found = rows_in(data, shard.version.format)
    if found != keep.sum():
        raise _lost(shard, keep, f"it gave {found}")
    return data


def rows_in(data: bytes, format: str) -> int:
    """How many rows a file of the format holds."""
    if format == "parquet":
        table = pq.read_table(pa.BufferReader(data), use_threads=False)
        return int(table.num_rows)
    if format == "arrow":
        is_file = data.startswith(b"ARROW1")
        with (pa.ipc.open_file if is_file else pa.ipc.open_stream)(pa.BufferReader(data)) as arrow:
            return int(arrow.read_all().num_rows)
    return records_in(data, format)


def _written(shard: Shard, options: Options, keep: Keep) -> bytes:
    format = shard.version.format
    if format == "parquet":
        return kept_parquet(shard, options, keep)
    if format == "arrow":
        return kept_arrow(shard, options, keep)
    if format == "warc.wet.gz":
        return kept_wet(shard, options, keep)
    return joined_lines(kept_lines(shard, options, keep), format)


def _lost(shard: Shard, keep: Keep, reason: str) -> StorageError:
    return StorageError(
        f"{shard.path}: {keep.sum()} rows from row {shard.piece.start_row} are to be kept and "
        f"cannot be copied: {reason}; mend the file and label it again, or drop what cannot be "
        f"read (filter.on_error: drop)"
    )
