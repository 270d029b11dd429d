"""The first rows of a file, with all of its columns. Entry point: `preview`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from pyarrow import types

from pipeline.sources.delimited import fields_of, file_segments, names_of
from pipeline.sources.documents import TooLong
from pipeline.sources.json_array import array_segments
from pipeline.sources.jsonl import line_segments, parsed_object
from pipeline.sources.records import blocks_of, records_of
from pipeline.sources.shards import ObjectVersion, Piece, Shard
from pipeline.sources.streams import Options, decompressed, reading
from pipeline.sources.tables import is_bytes, is_string, opened_table, strings_of
from pipeline.sources.text_files import text_rows
from pipeline.sources.webdataset import tar_texts
from pipeline.sources.wet import COLUMNS, wet_values

PREVIEW_ROWS = 500
PREVIEW_CHARS = 8 * 1024 * 1024  # a sample of long texts has fewer rows

Row = Mapping[str, object]


def preview(path: str, format: str, options: Options) -> dict[str, list[object]]:
    """Each column's values in the first rows that can be read; None where a row has no value.

    Columns that occur twice, and columns of lists, structs and bytes, are left out.
    """
    rows: list[Row] = []
    chars = 0
    with reading(path):
        for row in islice(_rows(path, format, options), PREVIEW_ROWS):
            rows.append({name: _as_text(value) for name, value in row.items()})
            chars += sum(len(value) for value in rows[-1].values() if isinstance(value, str))
            if chars > PREVIEW_CHARS:
                break
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _rows(path: str, format: str, options: Options) -> Iterator[Row]:
    version = ObjectVersion(path, 0, "", format, "text", "id")
    first = Shard(version, Piece(0, PREVIEW_ROWS, 0, 0, None))
    match format.partition(".")[0]:
        case "parquet" | "arrow":
            yield from _table_rows(first, options)
        case "warc":
            yield from wet_values(first, options, COLUMNS)
        case "txt":
            yield from ({"text": row.text, "id": row.id} for row in text_rows(first, options))
        case "tar":
            yield from tar_texts(first, options)
        case family:
            with decompressed(path, format, options) as stream:
                if family in ("csv", "tsv"):
                    yield from _delimited_rows(records_of(file_segments(stream, format)), format)
                    return
                segments = array_segments if family == "json" else line_segments
                for record in records_of(segments(blocks_of(stream))):
                    yield parsed_object(record)[0] or {}


def _table_rows(first: Shard, options: Options) -> Iterator[Row]:
    with opened_table(first, options) as table:
        names = [
            field.name
            for field in table.schema
            if table.schema.names.count(field.name) == 1
            and not (types.is_nested(field.type) or is_bytes(field.type))
        ]
        for batch in table.batches:
            columns = [batch.column(name) for name in names]
            values = [strings_of(c) if is_string(c.type) else c.to_pylist() for c in columns]
            yield from (dict(zip(names, row, strict=True)) for row in zip(*values, strict=True))


def _delimited_rows(records: Iterable[bytes | TooLong], format: str) -> Iterator[Row]:
    names: list[str] | None = None
    for record in records:
        if isinstance(record, TooLong):
            continue
        if names is None:
            names = names_of(record, format)
            continue
        fields, _ = fields_of(record, format)
        yield {
            name: field
            for name, field in zip(names, fields, strict=False)
            if names.count(name) == 1
        }


def _as_text(value: object) -> object:
    """Bytes as text; nothing in place of a value that is too long, a list or an object."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return None if isinstance(value, TooLong | list | dict) else value
