"""CSV and TSV: the units of a stream in one pass, and the rows of one piece.

Entry points: `delimited_units`, `delimited_rows`. The first record names the columns. Records and
fields end where those of Python's `csv` module end, so a quoted field may hold newlines. A blank
line is not a row. The text is UTF-8, with or without a byte order mark.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from pipeline.errors import Problem, SpecError
from pipeline.sources.documents import RawRow, TooLong, too_long
from pipeline.sources.records import Segment, blocks_of, records_of, shard_blocks, units_of
from pipeline.sources.shards import ObjectVersion, Shard, Unit, check_columns
from pipeline.sources.streams import Options, Stream, decompressed

_OTHER_DELIMITERS = (";", "|", "\t", ",")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How records and fields end."""

    delimiter: bytes
    # The end of a record, or a quote at the start of a field: elsewhere it is like any character.
    sign: re.Pattern[bytes]
    # A field: what is in its quotes and what follows them, or what is there without quotes.
    field: re.Pattern[bytes]


def _dialect_of(delimiter: bytes) -> Dialect:
    sign = re.compile(rb'\r\n?|\n|(?<=[%b\r\n])"' % delimiter)
    rest = rb"([^%b\r\n]*+)" % delimiter
    return Dialect(delimiter, sign, re.compile(rb'"((?:[^"]++|"")*+)(?:"%b)?|%b' % (rest, rest)))


_DIALECTS = {"csv": _dialect_of(b","), "tsv": _dialect_of(b"\t")}


def delimited_units(version: ObjectVersion, options: Options) -> Iterator[Unit]:
    """One unit for each row."""
    header = header_of(version, options)
    if not header:
        return
    _check_names(version, names_of(header, version.format))
    with decompressed(version.path, version.format, options) as stream:
        units = units_of(file_segments(stream, version.format))
        next(units)  # the header
        yield from units


def delimited_rows(shard: Shard, options: Options) -> Iterator[RawRow]:
    """The shard's rows; one record is held at a time, and none that is too long."""
    version = shard.version
    names = names_of(header_of(version, options), version.format)
    places = [
        names.index(column) if column in names else None
        for column in (version.text_column, version.id_column)
    ]
    for record in shard_records(shard, options):
        if isinstance(record, TooLong):
            yield RawRow(problem=too_long())
            continue
        fields, is_closed = fields_of(record, version.format)
        del record  # a text may be long: it is held once
        if not is_closed:
            yield RawRow(problem="a quote is not closed")
        elif len(fields) < len(names) or any(fields[len(names) :]):
            yield RawRow(problem=f"{len(fields)} fields, and the header has {len(names)}")
        else:
            text, id = (None if place is None else fields[place] for place in places)
            yield RawRow(text, id)
            del text
        del fields


def header_of(version: ObjectVersion, options: Options) -> bytes:
    """The first record as it is in the stream; empty for a file without records."""
    with decompressed(version.path, version.format, options) as stream:
        header = next(records_of(file_segments(stream, version.format)), b"")
    if isinstance(header, TooLong):
        raise OSError(f"its header is {too_long()}")
    return header


def shard_records(shard: Shard, options: Options) -> Iterator[bytes | TooLong]:
    """The records of the shard's rows, as they are in the stream."""
    blocks = shard_blocks(shard, options)
    return records_of(record_segments(blocks, _dialect(shard.version.format)))


def file_segments(stream: Stream, format: str) -> Iterator[Segment]:
    """The records of the whole stream, without its byte order mark."""
    head = stream.read(len(codecs.BOM_UTF8))
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise OSError("its text is UTF-16; save it as UTF-8")
    if head == codecs.BOM_UTF8:
        yield Segment(head, ends=True, blank=True)
        head = b""
    yield from record_segments(chain([head], blocks_of(stream)), _dialect(format))


def record_segments(blocks: Iterator[bytes], dialect: Dialect) -> Iterator[Segment]:
    """The records in the blocks, which begin at the start of a record.

    Law: each record is what `csv.reader` reads as one row.
    """
    sign = dialect.sign
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
                    yield Segment(record, ends=True, blank=not record.strip(b"\r\n"))
                    start = position
            else:
                break
        end = max(position, end)
        if start < end:
            yield Segment(data[start:end], ends=False, blank=False)
        before, held = data[end - 1 : end], data[end:]


def _dialect(format: str) -> Dialect:
    return _DIALECTS[format.partition(".")[0]]


def names_of(header: bytes, format: str) -> list[str]:
    """The columns; OSError if the header is not UTF-8."""
    fields, is_closed = fields_of(header, format)
    if not is_closed:
        raise OSError("a quote in its header is not closed")
    try:
        return [field.decode("utf-8") for field in fields]
    except UnicodeDecodeError:
        raise OSError("its header is not UTF-8; save the file as UTF-8") from None


def fields_of(record: bytes, format: str) -> tuple[list[bytes], bool]:
    """The record's fields, and whether its last quote is closed."""
    dialect = _dialect(format)
    pattern, fields, position = dialect.field, [], 0
    while True:
        field = pattern.match(record, position)
        assert field is not None, position
        quoted, behind, plain = field.groups()
        fields.append(plain if quoted is None else quoted.replace(b'""', b'"') + (behind or b""))
        if quoted is not None and behind is None:
            return fields, False
        position = field.end()
        if not record.startswith(dialect.delimiter, position):
            return fields, True
        position += len(dialect.delimiter)


def wrong_delimiter(names: Sequence[str]) -> str | None:
    """What to do about a header that is separated by another character; None if it is not."""
    other = next((sign for sign in _OTHER_DELIMITERS if sign in names[0]), None)
    if len(names) > 1 or other is None:
        return None
    return (
        f"its columns are separated by {other!r}; separate them by commas in a .csv file, or by "
        f"tabs in a .tsv file"
    )


def _check_names(version: ObjectVersion, names: list[str]) -> None:
    """SpecError unless the header has the columns; it names the delimiter that the file has."""
    fix = wrong_delimiter(names)
    if fix is not None and version.text_column not in names:
        raise SpecError([Problem("input.text", f"{version.path}: {fix}", version.text_column)])
    check_columns(version, names)
