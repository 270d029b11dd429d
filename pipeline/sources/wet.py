"""WET files of web archives. Entry points: `wet_units`, `wet_rows`.

A row is a conversion record, with the columns text, id, url and date.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.sources.documents import Names, Row, TooLong, too_long
from pipeline.sources.records import HEADERS_END, file_units, shard_records, warc_headers
from pipeline.sources.shards import ObjectVersion, Shard, Unit, check_columns
from pipeline.sources.streams import Options

_HEADERS = {"id": b"warc-record-id", "url": b"warc-target-uri", "date": b"warc-date"}
COLUMNS = ["text", *_HEADERS]


def wet_units(version: ObjectVersion, options: Options) -> Iterator[Unit]:
    """One unit for each conversion record; no record is held."""
    check_columns(version, COLUMNS)
    return file_units(version, options)


def wet_rows(shard: Shard, options: Options, _: Names) -> Iterator[Row]:
    """The shard's rows; one record is held at a time, and none that is too long.

    A text is bytes, and a header that is missing None.
    """
    return map(_row, shard_records(shard, options))


def _row(record: bytes | TooLong) -> Row:
    if isinstance(record, TooLong):
        return Row(problem=too_long())
    head, _, text = record.partition(HEADERS_END)
    headers = warc_headers(head)
    values = {key: headers.get(name) for key, name in _HEADERS.items()}
    return Row({"text": text} | {k: v and v.decode("utf-8", "replace") for k, v in values.items()})
