"""JSON lines: the units of a stream in one pass, and the rows of one piece.

Entry points: `object_units` and `object_rows`, which JSON arrays share. A line of white space alone
is not a row.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

from pipeline.hashes import parse_json
from pipeline.sources.documents import RawRow, TooLong, too_long
from pipeline.sources.records import (
    SAMPLE_ROWS,
    Segment,
    blocks_of,
    records_of,
    shard_blocks,
    units_of,
)
from pipeline.sources.shards import ObjectVersion, Shard, Unit, check_columns
from pipeline.sources.streams import Options, decompressed

SegmentsOf = Callable[[Iterator[bytes]], Iterator[Segment]]
RecordsOf = Callable[[Shard, Options], Iterator[bytes | TooLong]]


def object_units(
    version: ObjectVersion, options: Options, *, segments: SegmentsOf
) -> Iterator[Unit]:
    """One unit for each object of the stream; SpecError unless a first one has the keys."""
    with decompressed(version.path, version.format, options) as stream:
        check_keys(version, islice(records_of(segments(blocks_of(stream))), SAMPLE_ROWS))
    with decompressed(version.path, version.format, options) as stream:
        yield from units_of(segments(blocks_of(stream)))


def shard_lines(shard: Shard, options: Options) -> Iterator[bytes | TooLong]:
    """The lines of the shard's rows, as they are in the stream."""
    return records_of(line_segments(shard_blocks(shard, options)))


def line_segments(blocks: Iterable[bytes]) -> Iterator[Segment]:
    """The lines in the blocks, which begin at the start of a line."""
    for block in blocks:
        start = 0
        while newline := block.find(b"\n", start) + 1:
            line = block[start:newline]
            yield Segment(line, ends=True, blank=line.isspace())
            start = newline
        if start < len(block):
            yield Segment(block[start:], ends=False, blank=block[start:].isspace())


def check_keys(version: ObjectVersion, records: Iterable[bytes | TooLong]) -> None:
    """SpecError if none of these objects has the text key, or the id key; not without any."""
    keys: set[str] = set()
    required = {version.text_column, version.id_column, version.image_column} - {None}
    rows = 0
    for record in records:
        rows += 1
        value, _ = parsed_object(record)
        keys.update(value or ())
        if required <= keys:
            return
    if rows:
        check_columns(version, sorted(keys))


def object_rows(shard: Shard, options: Options, *, records: RecordsOf) -> Iterator[RawRow]:
    """The shard's rows, one for each JSON object; one is held at a time, and none too long."""
    # — a loop would hold a record beside its text
    yield from map(partial(_row, version=shard.version), records(shard, options))


def _row(line: bytes | TooLong, version: ObjectVersion) -> RawRow:
    value, problem = parsed_object(line)
    if value is None:
        return RawRow(problem=problem)
    columns = version.text_column, version.id_column, version.image_column
    text, id, image = (None if name is None else value.get(name) for name in columns)
    return RawRow(text, id, image=image)


def parsed_object(line: bytes | TooLong) -> tuple[dict[str, object] | None, str | None]:
    """The line's object, or the reason that there is none."""
    if isinstance(line, TooLong):
        return None, too_long()
    try:
        # — decoded here: the parser would guess UTF-16 from a stray NUL
        value = parse_json(line.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except UnicodeDecodeError:
        return None, "invalid UTF-8"
    except ValueError:  # also nested too deeply, or an integer of over 4,300 digits
        return None, "not JSON"
    if not isinstance(value, dict):
        return None, "not an object"
    return value, None
