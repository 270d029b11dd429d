"""WET files of web archives: the pieces of a stream in one pass, and the rows of one piece.

Knows WARC records; a row is a conversion record, with the columns text, id, url and date. Knows
nothing of shards' identity or of documents.
"""

from __future__ import annotations

from collections.abc import Iterator

from warcio.archiveiterator import ArchiveIterator
from warcio.exceptions import ArchiveLoadFailed
from warcio.recordloader import ArcWarcRecord

from pipeline.data.columns import check_named
from pipeline.data.documents import RawRow
from pipeline.data.shards import Piece, Shard, Unit, cut_units
from pipeline.data.streams import BLOCK_BYTES, Options, Stream, decompressed

_HEADERS = {"id": "WARC-Record-ID", "url": "WARC-Target-URI", "date": "WARC-Date"}
COLUMNS = ["text", *_HEADERS]


def wet_pieces(
    path: str,
    format: str,
    options: Options,
    *,
    text_column: str,
    id_column: str | None,
    target_bytes: int,
) -> list[Piece]:
    """Runs of conversion records; no record is held."""
    check_named(path, COLUMNS, text_column=text_column, id_column=id_column)
    with decompressed(path, format, options) as stream:
        return list(cut_units(_record_units(stream), target_bytes))


def wet_rows(shard: Shard, options: Options) -> Iterator[RawRow]:
    """The shard's rows; one record is held at a time."""
    assert shard.piece.start_byte is not None, shard
    with decompressed(shard.path, shard.version.format, options) as stream:
        stream.seek(shard.piece.start_byte)
        found = 0
        for record in _records(ArchiveIterator(_Forward(stream), no_record_parse=True)):
            if record.rec_type != "conversion":
                continue
            if found == shard.rows:
                return
            found += 1
            yield RawRow(
                _value(record, shard.version.text_column),
                _value(record, shard.version.id_column) if shard.version.id_column else None,
            )


def _record_units(stream: Stream) -> Iterator[Unit]:
    archive = ArchiveIterator(_Forward(stream), no_record_parse=True)
    for record in _records(archive):
        text_bytes = sum(len(block) for block in _blocks(record))
        start = archive.get_record_offset()
        if record.rec_type == "conversion":
            yield Unit(1, text_bytes, start, start + archive.get_record_length())


def _records(archive: ArchiveIterator) -> Iterator[ArcWarcRecord]:
    """The records, each left whole behind; OSError where the data is no WARC."""
    try:
        for record in archive:
            yield record
            archive.read_to_end()
            if archive.err_count:
                raise OSError("a WARC record's Content-Length is not its length")
    except ArchiveLoadFailed as error:
        raise OSError(f"not a WARC record: {error}") from error


def _value(record: ArcWarcRecord, column: str) -> object:
    if column == "text":
        return b"".join(_blocks(record))
    return record.rec_headers.get_header(_HEADERS[column])


def _blocks(record: ArcWarcRecord) -> Iterator[bytes]:
    """The record's content; OSError if it is shorter than its header says."""
    declared = record.rec_headers.get_header("Content-Length")
    position = 0
    while block := record.raw_stream.read(BLOCK_BYTES):
        position += len(block)
        yield block
    if declared != str(position):
        raise OSError(f"a WARC record of {position} bytes says {declared}")


class _Forward:
    """A stream without tell(): warcio then counts its offsets from where it began to read."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def read(self, size: int, /) -> bytes:
        return self._stream.read(size)
