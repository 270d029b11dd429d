"""CSV and TSV: the units of a stream in one pass, and the rows of one piece.

Entry points: `delimited_units`, `delimited_rows`. The first record names the columns. Records and
fields end where those of Python's `csv` module end, so a quoted field may hold newlines. A blank
line is not a row. The text is UTF-8, with or without a byte order mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from pipeline.errors import Problem, SpecError
from pipeline.sources.documents import Names, Row, TooLong, too_long
from pipeline.sources.records import file_segments, records_of, shard_records, units_of
from pipeline.sources.shards import ObjectVersion, Shard, Unit, check_columns
from pipeline.sources.streams import Options, decompressed

_OTHER_DELIMITERS = (";", "|", "\t", ",")
_DELIMITERS = {"csv": b",", "tsv": b"\t"}
# A field: what is in its quotes and what follows them, or what is there without quotes.
_FIELDS = {
    family: re.compile(rb'"((?:[^"]++|"")*+)(?:"([^%b\r\n]*+))?|([^%b\r\n]*+)' % (sign, sign))
    for family, sign in _DELIMITERS.items()
}


def delimited_units(version: ObjectVersion, options: Options) -> Iterator[Unit]:
    """One unit for each row."""
    header = header_of(version, options)
    if not header:
        return
    names, text = _names_of(header, version.format), version.text_column
    if text not in (*names, None) and (fix := wrong_delimiter(names)) is not None:
        raise SpecError([Problem("input.text", f"{version.path}: {fix}", text)])
    check_columns(version, names)
    with decompressed(version.path, version.format, options) as stream:
        # — without the header
        yield from islice(units_of(file_segments(stream, version.format)), 1, None)


def delimited_rows(shard: Shard, options: Options, names: Names) -> Iterator[Row]:
    """The shard's rows; one record is held at a time, and none that is too long.

    A row of another length has the values of its first fields, and its problem.
    """
    header = columns_of(shard.version, options)
    if names is None:
        names = [name for name in header if header.count(name) == 1]
    places = {name: header.index(name) for name in names if name in header}
    parse = partial(_row, format=shard.version.format, places=places, columns=len(header))
    return map(parse, shard_records(shard, options))


def _row(record: bytes | TooLong, *, format: str, places: Mapping[str, int], columns: int) -> Row:
    if isinstance(record, TooLong):
        return Row(problem=too_long())
    fields, is_closed = _fields_of(record, format)
    values = {name: fields[place] for name, place in places.items() if place < len(fields)}
    if not is_closed:
        return Row(values, "a quote is not closed")
    if len(fields) < columns or any(fields[columns:]):
        return Row(values, f"{len(fields)} fields, and the header has {columns}")
    return Row(values)


def header_of(version: ObjectVersion, options: Options) -> bytes:
    """The first record as it is in the stream; empty for a file without records."""
    with decompressed(version.path, version.format, options) as stream:
        header = next(records_of(file_segments(stream, version.format)), b"")
    if isinstance(header, TooLong):
        raise OSError(f"its header is {too_long()}")
    return header


def columns_of(version: ObjectVersion, options: Options) -> list[str]:
    """The names in the header."""
    return _names_of(header_of(version, options), version.format)


def _names_of(header: bytes, format: str) -> list[str]:
    """The columns; OSError if the header is not UTF-8."""
    fields, is_closed = _fields_of(header, format)
    if not is_closed:
        raise OSError("a quote in its header is not closed")
    try:
        return [field.decode("utf-8") for field in fields]
    except UnicodeDecodeError:
        raise OSError("its header is not UTF-8; save the file as UTF-8") from None


def _fields_of(record: bytes, format: str) -> tuple[list[bytes], bool]:
    """The record's fields, and whether its last quote is closed."""
    family = format.partition(".")[0]
    pattern, delimiter = _FIELDS[family], _DELIMITERS[family]
    fields, position = [], 0
    while True:
        field = pattern.match(record, position)
        assert field is not None, position
        quoted, behind, plain = field.groups()
        fields.append(plain if quoted is None else quoted.replace(b'""', b'"') + (behind or b""))
        if quoted is not None and behind is None:
            return fields, False
        position = field.end()
        if not record.startswith(delimiter, position):
            return fields, True
        position += 1


def wrong_delimiter(names: Sequence[str]) -> str | None:
    """What to do about a header that is separated by another character; None if it is not."""
    other = next((sign for sign in _OTHER_DELIMITERS if sign in names[0]), None)
    if len(names) > 1 or other is None:
        return None
    return (
        f"its columns are separated by {other!r}; separate them by commas in a .csv file, or by "
        f"tabs in a .tsv file"
    )
