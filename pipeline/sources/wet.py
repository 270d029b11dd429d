"""WET files of web archives. Entry points: `wet_units`, `wet_rows`.

A row is a conversion record, with the columns text, id, url and date.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeline.sources.documents import Names, Row, TooLong, too_long
from pipeline.sources.records import StreamPart, blocks_of, records_of, units_of
from pipeline.sources.shards import NAME_CHARS, ObjectVersion, Shard, Unit, check_columns
from pipeline.sources.streams import Options, decompressed, stream_at

# The largest headers of a record; without a limit, one endless line would be held in memory.
MAX_HEADER_BYTES = 1024 * 1024
_HEADERS = {"id": b"warc-record-id", "url": b"warc-target-uri", "date": b"warc-date"}
COLUMNS = ["text", *_HEADERS]
_MAGIC, _END = b"WARC/", b"\r\n\r\n"


def wet_units(version: ObjectVersion, options: Options) -> Iterator[Unit]:
    """One unit for each conversion record; no record is held."""
    check_columns(version, COLUMNS)
    with decompressed(version.path, version.format, options) as stream:
        yield from units_of(_segments(blocks_of(stream)))


def wet_rows(shard: Shard, options: Options, _: Names) -> Iterator[Row]:
    """The shard's rows; one record is held at a time, and none that is too long.

    A text is bytes, and a header that is missing None.
    """
    start, end = shard.piece.start_byte, shard.piece.end_byte
    assert start is not None and end is not None, shard
    with stream_at(shard.version, options, start) as stream:
        yield from map(_row, records_of(_segments(blocks_of(stream, end - start))))


def _row(record: bytes | TooLong) -> Row:
    if isinstance(record, TooLong):
        return Row(problem=too_long())
    head, _, text = record.partition(_END)
    headers = _headers(head)
    values = {key: headers.get(name) for key, name in _HEADERS.items()}
    return Row({"text": text} | {k: v and v.decode("utf-8", "replace") for k, v in values.items()})


def _headers(head: bytes) -> dict[bytes, bytes]:
    parts = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, _, value in parts}


def _segments(blocks: Iterable[bytes]) -> Iterator[StreamPart]:
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
            elif (head := data.find(_END, at)) >= 0:
                at = head + len(_END)
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
    headers = _headers(head)
    length = headers.get(b"content-length", b"")
    if not head.startswith(_MAGIC) or not length.isdigit():
        shown = head[:NAME_CHARS].decode(errors="replace")
        raise OSError(f"not a WARC record, or behind a wrong Content-Length: {shown!r}")
    return int(length), headers.get(b"warc-type") != b"conversion"
