"""JSON lines: the units of a stream in one pass, and the rows of one piece.

Entry points: `jsonl_units`, `jsonl_rows`. A line of white space alone is not a row.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from functools import partial
from itertools import islice

from pipeline.sources.documents import RawRow, RowBuffer, TooLong, too_long
from pipeline.sources.shards import ObjectVersion, Shard, Unit, check_columns
from pipeline.sources.streams import BLOCK_BYTES, Options, Stream, decompressed

# A key that none of the first rows has is reported as a misspelling.
SAMPLE_ROWS = 100


def jsonl_units(version: ObjectVersion, options: Options) -> Iterator[Unit]:
    """One unit for each row. No line is held, so any line takes the memory of one block."""
    with decompressed(version.path, version.format, options) as stream:
        _check_keys(version, stream)
    with decompressed(version.path, version.format, options) as stream:
        start = position = 0
        blank = True
        for segment, ends in _segments(stream):
            position += len(segment)
            blank = blank and segment.isspace()
            if ends:
                if not blank:
                    yield Unit(1, position - start, start, position)
                start, blank = position, True
        if not blank:  # the last line has no newline
            yield Unit(1, position - start, start, position)


def jsonl_rows(shard: Shard, options: Options) -> Iterator[RawRow]:
    """The shard's rows; one line is held at a time, and none that is too long."""
    read = partial(_row, text_column=shard.version.text_column, id_column=shard.version.id_column)
    yield from map(read, shard_lines(shard, options))  # a loop would hold a line beside its text


def shard_lines(shard: Shard, options: Options) -> Iterator[bytes | TooLong]:
    """The lines of the shard's rows, as they are in the stream."""
    assert shard.piece.start_byte is not None and shard.piece.end_byte is not None, shard
    with decompressed(shard.path, shard.version.format, options) as stream:
        stream.seek(shard.piece.start_byte)
        yield from lines_of(stream, shard.piece.end_byte - shard.piece.start_byte)


def _check_keys(version: ObjectVersion, stream: Stream) -> None:
    """SpecError if none of the first rows has the text key, or the id key; not without rows."""
    keys: set[str] = set()
    required = {version.text_column, version.id_column} - {None}
    rows = 0
    for line in islice(lines_of(stream), SAMPLE_ROWS):
        rows += 1
        value, _ = _parsed(line)
        keys.update(value or ())
        if required <= keys:
            return
    if rows:
        check_columns(version, sorted(keys))


def lines_of(stream: Stream, size_bytes: int | None = None) -> Iterator[bytes | TooLong]:
    """The rows in the next `size_bytes` of the stream, or in all of it."""
    line = RowBuffer()
    for segment, ends in _segments(stream, size_bytes):
        line.add(segment)
        if ends:
            if not line.blank:
                yield line.take()
            line = RowBuffer()
    if not line.blank:
        yield line.take()


def _segments(stream: Stream, size_bytes: int | None = None) -> Iterator[tuple[bytes, bool]]:
    """The stream in segments that end at a newline (True) or at a block's edge (False)."""
    left = size_bytes
    while block := stream.read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left)):
        start = 0
        while newline := block.find(b"\n", start) + 1:
            yield block[start:newline], True
            start = newline
        if start < len(block):
            yield block[start:], False
        left = None if left is None else left - len(block)


def _row(line: bytes | TooLong, text_column: str, id_column: str | None) -> RawRow:
    value, problem = _parsed(line)
    if value is None:
        return RawRow(problem=problem)
    return RawRow(value.get(text_column), value.get(id_column) if id_column else None)


def _parsed(line: bytes | TooLong) -> tuple[dict[str, object] | None, str | None]:
    """The line's object, or the reason that there is none."""
    if isinstance(line, TooLong):
        return None, too_long()
    try:
        # — decoded here: json.loads would guess UTF-16 from a stray NUL
        value = json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except UnicodeDecodeError:
        return None, "invalid UTF-8"
    except (ValueError, RecursionError):  # ValueError: also an integer of over 4,300 digits
        return None, "not JSON"
    if not isinstance(value, dict):
        return None, "not an object"
    return value, None
