"""Records of a text format: their places in a stream, and their bytes, one record at a time.

Entry points: `units_of` and `records_of`. Both take the segments that a format's scanner yields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pipeline.sources.documents import RowBuffer, TooLong
from pipeline.sources.shards import Shard, Unit
from pipeline.sources.streams import BLOCK_BYTES, Options, Stream, stream_at

# A column that none of the first rows has is reported as a misspelling.
SAMPLE_ROWS = 100


class Segment(NamedTuple):
    """Consecutive bytes of a stream, within one record or between two."""

    data: bytes
    ends: bool  # whether a record, or what is between two records, ends here
    blank: bool  # whether the bytes are no part of a record


def blocks_of(stream: Stream, size_bytes: int | None = None) -> Iterator[bytes]:
    """The next `size_bytes` of the stream in blocks, or all of it."""
    left = size_bytes
    while block := stream.read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left)):
        yield block
        left = None if left is None else left - len(block)


def shard_blocks(shard: Shard, options: Options) -> Iterator[bytes]:
    """The bytes of the shard's rows in its decompressed stream, in blocks."""
    piece = shard.piece
    assert piece.start_byte is not None and piece.end_byte is not None, shard
    with stream_at(shard.version, options, piece.start_byte) as stream:
        yield from blocks_of(stream, piece.end_byte - piece.start_byte)


def units_of(segments: Iterable[Segment]) -> Iterator[Unit]:
    """One unit for each record. No record is held, so any record takes the memory of one block."""
    start = position = 0
    blank = True
    for segment in segments:
        position += len(segment.data)
        blank = blank and segment.blank
        if segment.ends:
            if not blank:
                yield Unit(1, position - start, start, position)
            start, blank = position, True
    if not blank:  # the last record has no end
        yield Unit(1, position - start, start, position)


def records_of(segments: Iterable[Segment]) -> Iterator[bytes | TooLong]:
    """The bytes of each record; one is held at a time, and none that is too long."""
    record, blank = RowBuffer(), True
    for segment in segments:
        record.add(segment.data)
        blank = blank and segment.blank
        if segment.ends:
            if not blank:
                yield record.take()
            record, blank = RowBuffer(), True
    if not blank:
        yield record.take()
