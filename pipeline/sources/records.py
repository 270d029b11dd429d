"""Records of text formats: lines, the elements of a JSON array, and the records of CSV and TSV.

Entry points: `file_segments` for a whole stream and `shard_records` for the rows of a shard. A
record may be longer than memory, so a scanner yields it in segments: `units_of` measures records
without holding one, and `records_of` holds one at a time. Only the ends of records are searched;
`jsonl` and `delimited` parse what is in them.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import NamedTuple

from pipeline.sources.documents import MAX_ROW_BYTES, TooLong
from pipeline.sources.shards import ObjectVersion, Shard, Unit
from pipeline.sources.streams import BLOCK_BYTES, Options, Stream, decompressed, stream_at

# A column that none of the first rows has is reported as a misspelling, and a condition is tried on
# them before a run.
SAMPLE_ROWS = 100

# The rest of a string with its quote; without one, up to a backslash whose next byte is missing.
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+("?)', re.DOTALL)
_STRUCTURE = re.compile(rb'"%b|[\[\]{},]' % _IN_STRING.pattern, re.DOTALL)
_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[")
HEAD_BYTES = 4096  # of a .json file, which show whether it is an array
# — the first line may be longer than a block
_OBJECT_LINE = re.compile(rb"(?:\xef\xbb\xbf)?\s*\{(?:[^\n]*\}\s*\n|[^\n]*\Z)")


class StreamPart(NamedTuple):
    """Consecutive bytes of a stream, within one record or between two."""

    data: bytes
    ends: bool  # whether a record, or what is between two records, ends here
    blank: bool  # whether the bytes are no part of a record


def file_segments(stream: Stream, format: str, quoted: bool | None = None) -> Iterator[StreamPart]:
    """The records of the whole stream; OSError where they are not of the format."""
    scan_file, _ = _scanners(format, quoted)
    return scan_file(stream)


def shard_records(shard: Shard, options: Options) -> Iterator[bytes | TooLong]:
    """The records of the shard's rows, as they are in the decompressed stream."""
    _, scan_piece = _scanners(shard.version.format, shard.version.quoted)
    if scan_piece is _JSON_PIECE and not is_array(shard.version, options):
        scan_piece = _line_segments
    piece = shard.piece
    assert piece.start_byte is not None and piece.end_byte is not None, shard
    with stream_at(shard.version, options, piece.start_byte) as stream:
        yield from records_of(scan_piece(_blocks(stream, piece.end_byte - piece.start_byte)))


# Of files that earlier shards were of: whether they have an array.
_arrays: dict[ObjectVersion, bool] = {}


def is_array(version: ObjectVersion, options: Options) -> bool:
    """Whether a file of the format `json` has an array; others have JSON lines by that name."""
    if (known := _arrays.get(version)) is not None and version.etag:
        return known
    with decompressed(version.path, version.format, options) as stream:
        _arrays[version] = _ARRAY.match(stream.read(HEAD_BYTES)) is not None
    return _arrays[version]


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


def _line_segments(blocks: Iterable[bytes]) -> Iterator[StreamPart]:
    """The lines in the blocks, which begin at the start of a line."""
    for block in blocks:
        start = 0
        while newline := block.find(b"\n", start) + 1:
            line = block[start:newline]
            yield StreamPart(line, ends=True, blank=line.isspace())
            start = newline
        if start < len(block):
            yield StreamPart(block[start:], ends=False, blank=block[start:].isspace())


def _json_segments(blocks: Iterator[bytes]) -> Iterator[StreamPart]:
    """The elements of the array that fills the blocks, or the lines, of which each is an object."""
    head = next(blocks, b"")
    if (opened := _ARRAY.match(head, 0, HEAD_BYTES)) is not None:
        yield StreamPart(opened[0], ends=True, blank=True)
        yield from _element_segments(chain([head[opened.end() :]], blocks), closed=True)
    elif _OBJECT_LINE.match(head) or not head.strip():
        yield from _line_segments(chain([head], blocks))
    else:
        raise OSError("not a JSON array, and line 1 is no object; write [{...}, {...}], or lines")


def _element_segments(blocks: Iterator[bytes], *, closed: bool) -> Iterator[StreamPart]:
    """The elements from the first byte on, up to the array's end, or (not closed) to the last byte.

    A comma between two elements is a blank segment, so an element has exactly its own bytes.
    """
    depth, in_string, held, empty = 0, False, b"", closed
    for block in blocks:
        data = held + block
        start = position = 0
        if in_string and (match := _IN_STRING.match(data)):
            position, in_string = match.end(), not match[1]
        while not in_string and (match := _STRUCTURE.search(data, position)):
            position, sign = match.end(), data[match.start() : match.start() + 1]
            if sign == b'"':
                in_string = not match[1]
            elif depth == 0 and sign in b",]":
                element = data[start : match.start()]
                empty = empty and sign == b"]" and not element.strip()
                yield StreamPart(element, ends=True, blank=empty)
                if sign == b"]":
                    if any(rest.strip() for rest in chain([data[position:]], blocks)):
                        raise OSError("something follows its JSON array; write one array a file")
                    return
                yield StreamPart(sign, ends=True, blank=True)
                start = position
            else:
                depth += 1 if sign in b"[{" else -1 if sign in b"]}" else 0
        # — a backslash and the byte that it escapes are matched together
        held = data[position:] if in_string else b""
        if rest := data[start : len(data) - len(held)]:
            empty = empty and not rest.strip()
            yield StreamPart(rest, ends=False, blank=empty)
    if closed:
        raise OSError("its JSON array is not closed; the file may be incomplete")
    yield StreamPart(held, ends=True, blank=False)


def _delimited_file(stream: Stream, sign: re.Pattern[bytes]) -> Iterator[StreamPart]:
    """The records of the whole stream, without its byte order mark."""
    head = stream.read(len(codecs.BOM_UTF8))
    if head == codecs.BOM_UTF8:
        yield StreamPart(head, ends=True, blank=True)
        head = b""
    yield from _delimited_segments(chain([head], _blocks(stream)), sign)


def _delimited_segments(blocks: Iterator[bytes], sign: re.Pattern[bytes]) -> Iterator[StreamPart]:
    """The records in the blocks, which begin at the start of a record.

    `sign` matches the end of a record, or a quote at the start of a field: elsewhere, a quote is
    like any character. Law: each record is what `csv.reader` reads as one row.
    """
    before, held, in_quotes = b"\n", b"", False
    for block in chain(filter(None, blocks), [b""]):
        data = before + held + block
        start = position = len(before)
        # — what follows a quote or a CR decides what it means, so a last one waits for its block
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
                    yield StreamPart(record, ends=True, blank=not record.strip(b"\r\n"))
                    start = position
            else:
                break
        end = max(position, end)
        if start < end:
            yield StreamPart(data[start:end], ends=False, blank=False)
        before, held = data[end - 1 : end], data[end:]


def _blocks(stream: Stream, size_bytes: int | None = None) -> Iterator[bytes]:
    """The next `size_bytes` of the stream in blocks, or all of it."""
    left = size_bytes
    while block := stream.read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left)):
        yield block
        left = None if left is None else left - len(block)


DELIMITERS = {"csv": b",", "tsv": b"\t"}  # by the first part of a format


def is_quoted(format: str, told: bool | None) -> bool:
    """Whether a field may be in quotes: as the spec says, or else in CSV alone."""
    return format.startswith("csv") if told is None else told


# The scanner of a whole stream, and that of the bytes of a piece.
_Scanners = tuple[
    Callable[[Stream], Iterator[StreamPart]], Callable[[Iterator[bytes]], Iterator[StreamPart]]
]
_JSON_PIECE = partial(_element_segments, closed=False)
# By the first part of a format.
_SCANNERS: Mapping[str, _Scanners] = {
    "json": (lambda stream: _json_segments(_blocks(stream)), _JSON_PIECE),
}
# Of all other formats: a record is a line.
_LINES: _Scanners = (lambda stream: _line_segments(_blocks(stream)), _line_segments)


def _scanners(format: str, quoted: bool | None) -> _Scanners:
    family = format.partition(".")[0]
    if family not in DELIMITERS:
        return _SCANNERS.get(family, _LINES)
    quote = rb'|(?<=[%b\r\n])"' % DELIMITERS[family] if is_quoted(format, quoted) else b""
    sign = re.compile(rb"\r\n?|\n" + quote)
    return partial(_delimited_file, sign=sign), partial(_delimited_segments, sign=sign)
