"""The table of input formats, with the reader of each. Entry points: `reader_of`, `format_of`.

A reader is two functions in a module of the format. `READERS` is the only place that names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from pipeline.errors import StorageError
from pipeline.sources.delimited import delimited_rows, delimited_units
from pipeline.sources.documents import Names, Row
from pipeline.sources.jsonl import conversion, object_rows, object_units
from pipeline.sources.listing import FileInfo
from pipeline.sources.records import wet_rows, wet_units
from pipeline.sources.shards import ObjectVersion, Shard, Unit
from pipeline.sources.streams import Options, decompressed, opened, reading
from pipeline.sources.tables import table_rows, table_units
from pipeline.sources.text_files import LFS_POINTER, text_rows, text_units
from pipeline.sources.webdataset import tar_rows, tar_units

CONTENT_BYTES = 1024


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


_LINES = ("jsonl", "jsonl.gz", "jsonl.zst", "ndjson", "ndjson.gz", "ndjson.zst")
READERS = (
    Reader(("parquet",), 0, table_units, table_rows, has_images=True),
    Reader(_LINES, 0, object_units, object_rows, has_images=True),
    Reader(("arrow",), 0, table_units, table_rows, has_images=True),
    Reader(("warc.wet.gz",), 0, wet_units, wet_rows),
    Reader(("tar",), 0, tar_units, tar_rows, has_images=True),
    Reader(("csv", "csv.gz", "csv.zst"), 1, delimited_units, delimited_rows),
    Reader(("tsv", "tsv.gz", "tsv.zst"), 1, delimited_units, delimited_rows),
    Reader(("json", "json.gz", "json.zst"), 2, object_units, object_rows, has_images=True),
    Reader(("txt",), 3, text_units, text_rows),
    Reader(("lance",), 4, table_units, table_rows, has_images=True),
)


def reader_of(format: str) -> Reader:
    """The reader of a supported format."""
    return next(reader for reader in READERS if format in reader.formats)


def format_of(path: str) -> str | None:
    """The supported format that a file's name ends in, or None."""
    name = path.lower()
    formats = (format for reader in READERS for format in reader.formats)
    return next((format for format in formats if name.endswith(f".{format}")), None)


# The formats that a file may have instead of its name's: the first bytes in lower case, what to do
# about it, and the parts of the formats that do begin with these bytes.
_CONTENTS = (
    ((LFS_POINTER,), "a Git LFS pointer; run `git lfs pull`", ()),
    ((b"<!doctype html", b"<html"), "an HTML page; download the file itself", ()),
    ((b"\xff\xfe", b"\xfe\xff"), "UTF-16 text; save it as UTF-8", ()),
    ((b"\x1f\x8b",), "compressed with gzip; add .gz to its name", ("gz",)),
    ((b"\x28\xb5\x2f\xfd",), "compressed with zstd; add .zst to its name", ("zst",)),
    ((b"par1",), "Parquet; name it .parquet", ("parquet",)),
    ((b"pk\x03\x04",), "a zip archive; unpack it", ()),
    ((b"[",), "a JSON array; {conversion}", ()),
    ((b"{\n", b"{\r\n"), "JSON over several lines; write an object in each line (jq -c .)", ()),
    ((b"{",), "JSON; name it .json", ("json", "jsonl", "ndjson")),
)


def foreign_content(path: str, format: str, options: Options) -> str | None:
    """The actual kind of a file that cannot be read, with the fix; None if it is unknown."""
    heads = []
    for opening in (opened(path, options), decompressed(path, format, options)):
        with suppress(StorageError), reading(path), opening as stream:
            heads.append(stream.read(CONTENT_BYTES).lstrip().lower())
    for starts, content, parts in _CONTENTS:
        if set(parts).isdisjoint(format.split(".")) and any(h.startswith(starts) for h in heads):
            return content.format(conversion=conversion(path))
    return None


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
