"""Some of a shard's rows, as a file of the shard's own format: the same columns, the same bytes.

Knows which writer a format has and reads back what was written. Knows nothing of why a row is kept.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.errors import StorageError, UnreadableError
from pipeline.sources.arrow import opened_batches
from pipeline.sources.documents import TooLong, too_long
from pipeline.sources.jsonl import lines_of
from pipeline.sources.parquet import batch_rows, overlapping
from pipeline.sources.shards import MAX_SHARD_BYTES, Shard
from pipeline.sources.streams import (
    BLOCK_BYTES,
    Options,
    Stream,
    decompressed,
    one_line,
    opened,
    reading,
)
from pipeline.sources.wet import blocks_of, records_of

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


CODECS = {"gz": "gzip", "zst": "zstd"}
RECORD_END = b"\r\n\r\n"  # which a record's length does not count
# Headers and records that are no rows lie between a shard's texts.
MAX_RECORDS_BYTES = 4 * MAX_SHARD_BYTES


def kept_lines(shard: Shard, options: Options, keep: NDArray[np.bool_]) -> Iterator[bytes]:
    """The lines that are kept, each with its newline; the file's last line is given one."""
    assert shard.piece.start_byte is not None and shard.piece.end_byte is not None, shard
    with decompressed(shard.path, shard.version.format, options) as stream:
        stream.seek(shard.piece.start_byte)
        lines = lines_of(stream, shard.piece.end_byte - shard.piece.start_byte)
        left = int(keep.sum())
        for line, is_kept in zip(lines, keep if left else (), strict=False):
            if not is_kept:
                continue
            if isinstance(line, TooLong):
                raise OSError(f"a line is {too_long()}")
            yield line if line.endswith(b"\n") else line + b"\n"
            left -= 1
            if not left:  # what lies behind need not be readable
                return


def joined_lines(lines: Iterable[bytes], format: str) -> bytes:
    """The lines as one object, compressed as the format's name says."""
    codec = CODECS.get(format.rpartition(".")[2])
    sink = pa.BufferOutputStream()
    with sink if codec is None else pa.CompressedOutputStream(sink, codec) as stream:
        for line in lines:
            stream.write(line)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def kept_wet(shard: Shard, options: Options, keep: NDArray[np.bool_]) -> bytes:
    """The file's own description, and the records that are kept: each a gzip member of its own."""
    start, end = shard.piece.start_byte, shard.piece.end_byte
    assert start is not None and end is not None, shard
    kept: list[bytes] = []
    with decompressed(shard.path, shard.version.format, options) as stream:
        kept += _description(stream, start)
        stream.seek(start)
        if keep.any():
            records = _conversions(_taken(stream, end - start))
            kept += [each for each, is_kept in zip(records, keep, strict=False) if is_kept]
    return b"".join(gzip.compress(record, mtime=0) for record in kept)


def records_in(data: bytes, format: str) -> int:
    """How many lines, or conversion records, a file holds."""
    codec = CODECS.get(format.rpartition(".")[2])
    source = pa.BufferReader(data)
    if not data:
        return 0
    with source if codec is None else pa.CompressedInputStream(source, codec) as stream:
        if format == "warc.wet.gz":
            return sum(1 for _ in _conversions(stream.read()))
        return sum(1 for _ in lines_of(stream))


def _conversions(records: bytes) -> Iterator[bytes]:
    """Each conversion record, headers and all."""
    for archive, record in records_of(io.BytesIO(records)):
        for _ in blocks_of(record):
            pass
        start = archive.get_record_offset()
        if record.rec_type == "conversion":
            yield records[start : start + archive.get_record_length()] + RECORD_END


def _description(stream: Stream, end: int) -> list[bytes]:
    """The warcinfo record that the file begins with, if it has one."""
    prefix = stream.read(min(end, BLOCK_BYTES))
    for archive, record in records_of(io.BytesIO(prefix)):
        for _ in blocks_of(record):
            pass
        if record.rec_type == "warcinfo":
            return [prefix[: archive.get_record_length()] + RECORD_END]
        break
    return []


def _taken(stream: Stream, size_bytes: int) -> bytes:
    if size_bytes > MAX_RECORDS_BYTES:
        raise OSError(f"its records are {size_bytes:,} bytes, above {MAX_RECORDS_BYTES:,}")
    blocks = io.BytesIO()
    while blocks.tell() < size_bytes:
        block = stream.read(min(BLOCK_BYTES, size_bytes - blocks.tell()))
        if not block:
            raise OSError("it ends before its last row")
        blocks.write(block)
    return blocks.getvalue()


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
