"""Some of a shard's lines or WET records, their bytes as they were.

Knows newlines, WARC records, gzip and zstd. Knows nothing of why a row is kept.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.data.jsonl import lines_of
from pipeline.data.row_limits import TooLong, too_long
from pipeline.data.shards import MAX_SHARD_BYTES, Shard
from pipeline.data.streams import BLOCK_BYTES, Options, Stream, decompressed
from pipeline.data.wet import blocks_of, records_of

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
    opening = stream.read(min(end, BLOCK_BYTES))
    for archive, record in records_of(io.BytesIO(opening)):
        for _ in blocks_of(record):
            pass
        if record.rec_type == "warcinfo":
            return [opening[: archive.get_record_length()] + RECORD_END]
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
