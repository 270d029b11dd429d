"""The table of input formats, with the reader of each. Entry points: `reader_of`, `format_of`.

A reader is two functions in a module of the format. `READERS` is the only place that names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pipeline.sources.delimited import delimited_rows, delimited_units
from pipeline.sources.documents import Names, Row
from pipeline.sources.jsonl import object_rows, object_units
from pipeline.sources.listing import FileInfo
from pipeline.sources.shards import ObjectVersion, Shard, Unit
from pipeline.sources.streams import Options
from pipeline.sources.tables import table_rows, table_units
from pipeline.sources.text_files import text_rows, text_units
from pipeline.sources.webdataset import tar_rows, tar_units
from pipeline.sources.wet import wet_rows, wet_units


@dataclass(frozen=True, slots=True)
class Reader:
    """How the files of one family of formats are cut and read."""

    formats: tuple[str, ...]  # the endings of the files' names, without the dot before them
    # Of a folder, only files of the lowest kind that occurs are read: files of higher kinds often
    # describe the others, such as a card, a list of features or a licence.
    kind: int
    units: Callable[[ObjectVersion, Options], Iterator[Unit]]  # measures an object
    rows: Callable[[Shard, Options, Names], Iterator[Row]]  # reads these columns of a shard
    has_images: bool = False


READERS = (
    Reader(("parquet",), 0, table_units, table_rows, has_images=True),
    Reader(("jsonl", "jsonl.gz", "jsonl.zst"), 0, object_units, object_rows, has_images=True),
    Reader(("arrow",), 0, table_units, table_rows, has_images=True),
    Reader(("warc.wet.gz",), 0, wet_units, wet_rows),
    Reader(("tar",), 0, tar_units, tar_rows, has_images=True),
    Reader(("csv", "csv.gz", "csv.zst"), 1, delimited_units, delimited_rows),
    Reader(("tsv", "tsv.gz", "tsv.zst"), 1, delimited_units, delimited_rows),
    Reader(("json", "json.gz", "json.zst"), 2, object_units, object_rows, has_images=True),
    Reader(("txt",), 3, text_units, text_rows),
)


def reader_of(format: str) -> Reader:
    """The reader of a supported format."""
    return next(reader for reader in READERS if format in reader.formats)


def format_of(path: str) -> str | None:
    """The supported format that a file's name ends in, or None."""
    name = path.lower()
    formats = (format for reader in READERS for format in reader.formats)
    return next((format for format in formats if name.endswith(f".{format}")), None)


def supported() -> str:
    """The endings of the names of all files that are read, for errors."""
    return " ".join(f".{format}" for reader in READERS for format in reader.formats)


def of_first_kind(infos: Iterable[FileInfo]) -> list[FileInfo]:
    """The files of the lowest kind that occurs."""
    by_kind: dict[int, list[FileInfo]] = {}
    for info in infos:
        if (format := format_of(info["name"])) is not None:
            by_kind.setdefault(reader_of(format).kind, []).append(info)
    return by_kind[min(by_kind)] if by_kind else []
