"""JSON lines: the units of a stream in one pass, and the rows of one piece.

Entry points: `object_units`, `object_rows`. Each row is an object. A line of white space alone is
not a row.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from itertools import islice

from pipeline.errors import MissingColumnsError, Problem
from pipeline.hashes import parse_json
from pipeline.sources.documents import Names, Row, TooLong, too_long
from pipeline.sources.records import SAMPLE_ROWS, file_records, file_units, shard_records
from pipeline.sources.shards import NAME_CHARS, ObjectVersion, Shard, Unit, check_columns
from pipeline.sources.streams import Options


def object_units(version: ObjectVersion, options: Options) -> Iterator[Unit]:
    """One unit for each object of the stream; SpecError unless a first one has the keys."""
    _check_keys(version, file_records(version, options))
    return file_units(version, options)


def _check_keys(version: ObjectVersion, records: Iterable[bytes | TooLong]) -> None:
    """MissingColumnsError if none of the first rows has one of the keys that are read.

    OSError if a file by the name of `.json` does not begin with a line that is an object.
    """
    keys: set[str] = set()
    required = {version.text_column, version.id_column, version.image_column} - {None}
    first: str | None = None
    for number, record in enumerate(islice(records, SAMPLE_ROWS)):
        if not number and version.format.partition(".")[0] == "json" and not _is_line(record):
            raise OSError(
                f"line 1 is no object; write one in each line, or {conversion(version.path)}"
            )
        row = _row(record)
        keys.update(row.values)
        if required <= keys:
            return
        if first is None:
            start = b"" if isinstance(record, TooLong) else record[:NAME_CHARS].strip()
            problem = row.problem or "an object without keys"
            first = f"line 1 is {problem}: {start.decode(errors='replace')!r}"
    if first is not None and not keys:
        fix = f"{version.path}: {first}; write a JSON object in each line"
        raise MissingColumnsError([Problem("input.path", fix)])
    if first is not None:
        check_columns(version, sorted(keys))


def _is_line(record: bytes | TooLong) -> bool:
    """Whether it has the ends of an object."""
    if isinstance(record, TooLong):
        return True
    line = record.removeprefix(codecs.BOM_UTF8).strip()
    return line.startswith(b"{") and line.endswith(b"}")


def conversion(path: str) -> str:
    """How to make a file of JSON that is not in lines readable."""
    return f"""convert it: duckdb -c "copy (from '{path}') to '{path}.parquet'\""""


def object_rows(shard: Shard, options: Options, _: Names) -> Iterator[Row]:
    """The shard's rows, with all keys; one is held at a time, and none that is too long."""
    # — a loop would hold a record beside its text
    return map(_row, shard_records(shard, options))


def _row(record: bytes | TooLong) -> Row:
    """The object, or the reason that there is none."""
    if isinstance(record, TooLong):
        return Row(problem=too_long())
    try:
        # — decoded here: the parser would guess UTF-16 from a stray NUL
        value = parse_json(record.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except UnicodeDecodeError:
        return Row(problem="invalid UTF-8")
    except ValueError:  # also nested too deeply, or an integer of over 4,300 digits
        return Row(problem="not JSON")
    return Row(value) if isinstance(value, dict) else Row(problem="not an object")
