"""WET files of web archives: the units of a stream in one pass, and the rows of one piece.

Entry points: `wet_units`, `wet_rows`. A row is a conversion record, with the columns text, id, url
and date.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from warcio.archiveiterator import ArchiveIterator
from warcio.exceptions import ArchiveLoadFailed
from warcio.recordloader import ArcWarcRecord

from pipeline.sources.documents import Names, Row, TooLong
from pipeline.sources.records import StreamPart, records_of
from pipeline.sources.shards import ObjectVersion, Shard, Unit, check_columns
from pipeline.sources.streams import BLOCK_BYTES, Options, Stream, decompressed, stream_at

# The largest headers of a record; without a limit, one endless line would be held in memory.
MAX_HEADER_BYTES = 1024 * 1024
_HEADERS = {"id": "WARC-Record-ID", "url": "WARC-Target-URI", "date": "WARC-Date"}
COLUMNS = ["text", *_HEADERS]


def wet_units(version: ObjectVersion, options: Options) -> Iterator[Unit]:
    """One unit for each conversion record; no record is held."""
    check_columns(version, COLUMNS)
    with decompressed(version.path, version.format, options) as stream:
        for archive, record in _records(stream):
            text_bytes = sum(len(block) for block in _blocks(record))
            start = archive.get_record_offset()
            if record.rec_type == "conversion":
                yield Unit(1, text_bytes, start, start + archive.get_record_length())


def wet_rows(shard: Shard, options: Options, names: Names) -> Iterator[Row]:
    """The shard's rows; one record is held at a time, and none that is too long.

    A text is bytes, and a header that is missing None.
    """
    piece = shard.piece
    assert piece.start_byte is not None, shard
    size_bytes = None if piece.end_byte is None else piece.end_byte - piece.start_byte
    headers = {key: _HEADERS[key] for key in _HEADERS if names is None or key in names}
    with stream_at(shard.version, options, piece.start_byte) as stream:
        records = _records(stream, size_bytes)
        conversions = (record for _, record in records if record.rec_type == "conversion")
        for record in islice(conversions, shard.rows):
            values = {key: record.rec_headers.get_header(name) for key, name in headers.items()}
            has_text = names is None or "text" in names
            yield Row(values | ({"text": _text(record)} if has_text else {}))


def _records(
    stream: Stream, size_bytes: int | None = None
) -> Iterator[tuple[ArchiveIterator, ArcWarcRecord]]:
    """The records in the next bytes, each read to its end; OSError where the data is not WARC."""
    forward = _Forward(stream, size_bytes)
    archive = ArchiveIterator(forward, no_record_parse=True)
    try:
        for record in archive:
            forward.left = None
            yield archive, record
            archive.read_to_end()
            if archive.err_count:
                raise OSError("a WARC record has a wrong Content-Length")
            forward.left = MAX_HEADER_BYTES
    except ArchiveLoadFailed as error:
        raise OSError(f"not a WARC record: {error}") from error


def _text(record: ArcWarcRecord) -> bytes | TooLong:
    segments = (StreamPart(block, ends=False, blank=False) for block in _blocks(record))
    return next(records_of(segments), b"")


def _blocks(record: ArcWarcRecord) -> Iterator[bytes]:
    """The record's content in blocks; OSError if it is shorter than its header says."""
    declared = record.rec_headers.get_header("Content-Length")
    position = 0
    while block := record.raw_stream.read(BLOCK_BYTES):
        position += len(block)
        yield block
    if declared != str(position):
        raise OSError(f"a WARC record has {position} bytes, and its Content-Length is {declared}")


class _Forward:
    """A stream without tell(), so that warcio counts offsets from where it starts to read.

    It ends after `size_bytes`: warcio reads ahead, and the next shard continues the stream.
    """

    def __init__(self, stream: Stream, size_bytes: int | None) -> None:
        self._stream = stream
        self._size_bytes = size_bytes
        self.left: int | None = MAX_HEADER_BYTES  # None while a record's content is read

    def read(self, size: int, /) -> bytes:
        if self._size_bytes is not None:
            size = min(size, self._size_bytes)
            self._size_bytes -= size
        data = self._stream.read(size)
        if self.left is not None:
            self.left -= len(data)
            if self.left < 0:
                raise OSError(f"a WARC record's headers are over {MAX_HEADER_BYTES:,} bytes")
        return data
