"""CSV and TSV: the units of a stream in one pass, and the rows of one piece.

Entry points: `delimited_units`, `delimited_rows`. The first record names the columns. Records and
fields end where those of Python's `csv` module end, so a quoted field may hold newlines. In TSV, a
quote is a character, unless the spec says otherwise. A blank line is not a row. The text is UTF-8,
with or without a byte order mark.
"""

from __future__ import annotations

import codecs
import csv
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice

from pipeline.errors import Problem, SpecError
from pipeline.sources.documents import MAX_ROW_BYTES, Names, Row, TooLong, too_long
from pipeline.sources.records import (
    DELIMITERS,
    StreamPart,
    file_records,
    file_segments,
    is_quoted,
    shard_records,
    units_of,
)
from pipeline.sources.shards import ObjectVersion, Shard, Unit, check_columns
from pipeline.sources.streams import Options, decompressed

logger = logging.getLogger(__name__)

csv.field_size_limit(MAX_ROW_BYTES)  # of the process; a record is no longer than that
_OTHER_DELIMITERS = (";", "|", "\t", ",")
_BREAK = re.compile(rb"\r\n?|\n")
_DIGITS = re.compile(rb"\d+")
_DOUBT_BYTES = 64 * 1024  # of a record that are looked at


def delimited_units(version: ObjectVersion, options: Options) -> Iterator[Unit]:
    """One unit for each row."""
    header = header_of(version, options)
    if not header:
        return
    names, text = _names_of(header, version), version.text_column
    fix = wrong_delimiter(names)
    if b'"' in header and not is_quoted(version.format, version.quoted):
        fix = fix or "its header has quotes; if its fields are in quotes, set input.quoted: true"
    if text not in (*names, None) and fix is not None:
        raise SpecError([Problem("input.text", f"{version.path}: {fix}", text)])
    check_columns(version, names)
    with decompressed(version.path, version.format, options) as stream:
        segments = file_segments(stream, version.format, version.quoted)
        # — without the header
        yield from islice(units_of(_doubted(segments, version)), 1, None)


def _doubted(segments: Iterable[StreamPart], version: ObjectVersion) -> Iterator[StreamPart]:
    """The segments of a whole file; after the last, a warning of quotes that may merge lines."""
    lines, record_lines, record, doubts = 0, 0, b"", []
    for segment in chain(segments, [StreamPart(b"", ends=True, blank=True)]):
        yield segment
        record += segment.data[: _DOUBT_BYTES - len(record)]
        record_lines += segment.data.count(b"\n") or segment.data.count(b"\r")
        if segment.ends:
            if b'"' in record and _is_doubtful(record, record_lines, version):
                doubts.append(lines + 1)
            record, lines, record_lines = b"", lines + record_lines, 0
    if doubts:
        text = "%s, line %d: a quote seems not to be closed, so that lines are merged into one row;"
        text += " %d rows of the file are like this; close the quotes, or set input.quoted: false"
        logger.warning(text, version.path, doubts[0], len(doubts))


def _is_doubtful(record: bytes, lines: int, version: ObjectVersion) -> bool:
    """Whether a quote is not closed, or is closed by one that seems to open another field.

    The latter if the lines of the record begin in the same way, apart from digits.
    """
    if not is_quoted(version.format, version.quoted):
        return False
    if (fields := _fields_of(record, version)) is None:
        return lines > 1 or len(record) < _DOUBT_BYTES
    delimiter = DELIMITERS[version.format.partition(".")[0]]
    begins = _DIGITS.sub(b"0", fields[0] + delimiter)
    starts = [_DIGITS.sub(b"0", line) for line in _BREAK.split(record.rstrip(b"\r\n"))]
    return lines > 1 and all(start.startswith(begins) for start in starts)


def delimited_rows(shard: Shard, options: Options, names: Names) -> Iterator[Row]:
    """The shard's rows; one record is held at a time, and none that is too long."""
    version = shard.version
    header = columns_of(version, options)
    if names is None:
        names = [name for name in header if header.count(name) == 1]
    places = {name: header.index(name) for name in names if name in header}
    parse = partial(_row, version=version, places=places, columns=len(header))
    return map(parse, shard_records(shard, options))


def _row(
    record: bytes | TooLong, *, version: ObjectVersion, places: Mapping[str, int], columns: int
) -> Row:
    if isinstance(record, TooLong):
        return Row(problem=too_long())
    fields = _fields_of(record, version)
    if fields is None:
        return Row(problem="a quote is not closed")
    if len(fields) < columns or any(fields[columns:]):
        return Row(problem=f"{len(fields)} fields, and the header has {columns}")
    return Row({name: fields[place] for name, place in places.items()})


def header_of(version: ObjectVersion, options: Options) -> bytes:
    """The first record, without a byte order mark; empty for a file without records."""
    header = next(file_records(version, options), b"")
    if isinstance(header, TooLong):
        raise OSError(f"its header is {too_long()}")
    return header.removeprefix(codecs.BOM_UTF8)


def columns_of(version: ObjectVersion, options: Options) -> list[str]:
    """The names in the header."""
    return _names_of(header_of(version, options), version)


def _names_of(header: bytes, version: ObjectVersion) -> list[str]:
    """The columns; OSError if the header is not UTF-8."""
    fields = _fields_of(header, version)
    if fields is None:
        raise OSError("a quote in its header is not closed")
    try:
        return [field.decode("utf-8") for field in fields]
    except UnicodeDecodeError:
        raise OSError("its header is not UTF-8; save the file as UTF-8") from None


def _fields_of(record: bytes, version: ObjectVersion) -> list[bytes] | None:
    """The record's fields; None if a quote is not closed.

    In a record of several lines, text after a closing quote counts as a quote that is not closed,
    which merges lines up to the next quote.
    """
    lines = csv.reader(
        # — bytes that are not UTF-8 stay as they are; what is not closed continues on a second line
        [record.decode("utf-8", "surrogateescape"), ""],
        delimiter=DELIMITERS[version.format.partition(".")[0]].decode(),
        quoting=csv.QUOTE_MINIMAL if is_quoted(version.format, version.quoted) else csv.QUOTE_NONE,
        strict=b"\n" in record.rstrip(b"\r\n"),
    )
    try:
        fields = next(lines)
    except csv.Error:
        return None
    is_closed = lines.line_num == 1
    return [field.encode("utf-8", "surrogateescape") for field in fields] if is_closed else None


def wrong_delimiter(names: Sequence[str]) -> str | None:
    """What to do about a header that is separated by another character; None if it is not."""
    other = next((sign for sign in _OTHER_DELIMITERS if sign in names[0]), None)
    if len(names) > 1 or other is None:
        return None
    return (
        f"its columns are separated by {other!r}; separate them by commas in a .csv file, or by "
        f"tabs in a .tsv file"
    )
