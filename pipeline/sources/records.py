"""Records of text formats: lines, the records of CSV and TSV, and those of web archives.

Entry points: `file_units`, `file_records` and `shard_records`; `file_segments` for an open stream;
`wet_units` and `wet_rows` for the WET files of web archives. A record may be longer than memory, so
a scanner yields it in segments: `units_of` measures records without holding one, and `records_of`
holds one at a time. Only the ends of records are searched; `jsonl` and `delimited` parse what is in
them.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from pipeline.sources.documents import MAX_ROW_BYTES, Names, Row, TooLong, too_long
from pipeline.sources.shards import NAME_CHARS, ObjectVersion, Shard, Unit, check_columns
from pipeline.sources.streams import BLOCK_BYTES, Options, Stream, decompressed, stream_at

# A column that none of the first rows has is reported as a misspelling, and a condition is tried on
# them before a run.
SAMPLE_ROWS = 100
# The largest headers of a WARC record; without a limit, one endless line would be held in memory.
MAX_HEADER_BYTES = 1024 * 1024
HEADERS_END = b"\r\n\r\n"
# The columns of a WET file beside the text, and the headers that have their values.
_WET_HEADERS = {"id": b"warc-record-id", "url": b"warc-target-uri", "date": b"warc-date"}


class StreamPart(NamedTuple):
    """Consecutive bytes of a stream, within one record or between two."""

    data: bytes
    ends: bool  # whether a record, or what is between two records, ends here
    blank: bool  # whether the bytes are no part of a record


def file_segments(
    stream: Stream, format: str, quoted: bool | None = None, size_bytes: int | None = None
) -> Iterator[StreamPart]:
    """The records of the stream, or of its next `size_bytes`."""
    family = format.partition(".")[0]
    if family == "warc":
        return _warc_segments(_blocks(stream, size_bytes))
    if family not in DELIMITERS:  # a record is a line; one of white space is none
        return _segments(_blocks(stream, size_bytes), re.compile(rb"\n"), None)
    quote = rb'|(?<=[%b\r\n])"' % DELIMITERS[family] if is_quoted(format, quoted) else b""
    end = re.compile(rb"\r\n?|\n" + quote)
    first = b"" if size_bytes is not None else stream.read(len(codecs.BOM_UTF8))
    # — a part of its own: a quote behind it begins a field
    mark = first if first == codecs.BOM_UTF8 else b""
    blocks = chain([first.removeprefix(mark)], _blocks(stream, size_bytes))
    return chain([StreamPart(mark, ends=False, blank=True)], _segments(blocks, end, b"\r\n"))


def file_units(version: ObjectVersion, options: Options) -> Iterator[Unit]:
    """One unit for each record of the file."""
    with decompressed(version.path, version.format, options) as stream:
        yield from units_of(file_segments(stream, version.format, version.quoted))


def file_records(version: ObjectVersion, options: Options) -> Iterator[bytes | TooLong]:
    """The records of the file."""
    with decompressed(version.path, version.format, options) as stream:
        yield from records_of(file_segments(stream, version.format, version.quoted))


def shard_records(shard: Shard, options: Options) -> Iterator[bytes | TooLong]:
    """The records of the shard's rows, as they are in the decompressed stream."""
    version, piece = shard.version, shard.piece
    assert piece.start_byte is not None and piece.end_byte is not None, shard
    with stream_at(version, options, piece.start_byte) as stream:
        size_bytes = piece.end_byte - piece.start_byte
        yield from records_of(file_segments(stream, version.format, version.quoted, size_bytes))


def units_of(segments: Iterable[StreamPart]) -> Iterator[Unit]:
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


def records_of(segments: Iterable[StreamPart]) -> Iterator[bytes | TooLong]:
    """The bytes of each record; one is held at a time, and none that is too long."""
    parts: list[bytes] = []
    size_bytes, blank = 0, True
    # — the last record may have no end
    for segment in chain(segments, [StreamPart(b"", ends=True, blank=True)]):
        size_bytes += len(segment.data)
        if size_bytes > MAX_ROW_BYTES:
            parts.clear()
        else:
            parts.append(segment.data)
        blank = blank and segment.blank
        if segment.ends:
            if not blank:
                yield TooLong() if size_bytes > MAX_ROW_BYTES else _taken(parts)
            parts.clear()
            size_bytes, blank = 0, True


def _taken(parts: list[bytes]) -> bytes:
    """The parts joined; the list no longer holds them."""
    record = b"".join(parts)
    parts.clear()
    return record


def _segments(
    blocks: Iterator[bytes], sign: re.Pattern[bytes], white: bytes | None
) -> Iterator[StreamPart]:
    """The records in the blocks, which begin at the start of a record.

    `sign` matches the end of a record, or a quote at the start of a field: elsewhere, a quote is
    like any character. A record of bytes of `white` is blank. Law: each record of CSV is what
    `csv.reader` reads as one row.
    """
    before, held, in_quotes = b"\n", b"", False
    for block in chain(filter(None, blocks), [b""]):
        data = before + held + block
        start = position = len(before)
        # — the meaning of a quote or a CR depends on the next byte, so a last one waits for its
        # block
        end = len(data) - (bool(block) and data.endswith((b'"', b"\r")))
        while True:
            if in_quotes:
                quote = data.find(b'"', position, end)
                if quote < 0:
                    break
                in_quotes = data.startswith(b'""', quote)
                position = quote + 1 + in_quotes
            elif match := sign.search(data, position, end):
                position = match.end()
                in_quotes = match[0] == b'"'
                if not in_quotes:
                    record = data[start:position]
                    yield StreamPart(record, ends=True, blank=not record.strip(white))
                    start = position
            else:
                break
        end = max(position, end)
        if start < end:
            part = data[start:end]
            yield StreamPart(part, ends=False, blank=not part.strip(white))
        before, held = data[end - 1 : end], data[end:]


def _warc_segments(blocks: Iterable[bytes]) -> Iterator[StreamPart]:
    """The records in the blocks, which begin at the start of a record; other types are blank.

    OSError where the data is not WARC.
    """
    held, left, blank = b"", 0, True  # left: the bytes of a record's content still to come
    for block in blocks:
        data, at, held = held + block, 0, b""
        while at < len(data):
            start = at
            if left:
                at = min(len(data), at + left)
                left -= at - start
            elif data[at] in b"\r\n":  # between two records
                at, blank = at + 1, True
            elif (head := data.find(HEADERS_END, at)) >= 0:
                at = head + len(HEADERS_END)
                left, blank = _content(data[start:head])
            else:
                held = data[at:]
                break
            yield StreamPart(data[start:at], ends=not left, blank=blank)
        if len(held) > MAX_HEADER_BYTES:
            raise OSError(f"a WARC record's headers are over {MAX_HEADER_BYTES:,} bytes")
    if left or held:
        raise OSError("a WARC record is not whole: its headers or its content end too early")


def _content(head: bytes) -> tuple[int, bool]:
    """The length of a record's content, and whether the record is no row."""
    headers = _warc_headers(head)
    length = headers.get(b"content-length", b"")
    if not head.startswith(b"WARC/") or not length.isdigit():
        shown = head[:NAME_CHARS].decode(errors="replace")
        raise OSError(f"not a WARC record, or behind a wrong Content-Length: {shown!r}")
    return int(length), headers.get(b"warc-type") != b"conversion"


def _warc_headers(head: bytes) -> dict[bytes, bytes]:
    """The values of the headers of a WARC record, by name in lower case."""
    parts = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, _, value in parts}


def wet_units(version: ObjectVersion, options: Options) -> Iterator[Unit]:
    """One unit for each conversion record; no record is held."""
    check_columns(version, ["text", *_WET_HEADERS])
    return file_units(version, options)


def wet_rows(shard: Shard, options: Options, _: Names) -> Iterator[Row]:
    """The shard's rows; one record is held at a time, and none that is too long.

    A text is bytes, and a header that is missing None.
    """
    return map(_wet_row, shard_records(shard, options))


def _wet_row(record: bytes | TooLong) -> Row:
    if isinstance(record, TooLong):
        return Row(problem=too_long())
    head, _, text = record.partition(HEADERS_END)
    headers = _warc_headers(head)
    values = {key: headers.get(name) for key, name in _WET_HEADERS.items()}
    return Row({"text": text} | {k: v and v.decode("utf-8", "replace") for k, v in values.items()})


def _blocks(stream: Stream, size_bytes: int | None = None) -> Iterator[bytes]:
    """The next `size_bytes` of the stream in blocks, or all of it."""
    left = size_bytes
    while block := stream.read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left)):
        yield block
        left = None if left is None else left - len(block)


DELIMITERS = {"csv": b",", "tsv": b"\t"}  # by the first part of a format


def is_quoted(format: str, stated: bool | None) -> bool:
    """Whether a field may be in quotes: as in the spec, or else in CSV alone."""
    return format.startswith("csv") if stated is None else stated
