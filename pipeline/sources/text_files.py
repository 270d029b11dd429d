"""Text files, one document each. All text files that a path names are one object with many rows.

Entry points: `text_units`, `text_rows`, and `text_state`, the identity of such an object. A shard
thus holds many small files. Its rows have the columns `text`, and `id`: the file's path below the
folder that is named, or that the glob starts from.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.hashes import canonical_json, content_hash, short_hash
from pipeline.sources.documents import RawRow, RowBuffer, TooLong
from pipeline.sources.listing import FileInfo, files_at, format_of, irregularity, remote_etag
from pipeline.sources.records import blocks_of
from pipeline.sources.shards import ObjectVersion, Shard, Unit, check_columns
from pipeline.sources.streams import Options, fetching, opened
from pipeline.stores.file_systems import file_system_at

COLUMNS = ["text", "id"]


def text_units(version: ObjectVersion, options: Options) -> Iterator[Unit]:
    """One unit for each file; no file is opened."""
    check_columns(version, COLUMNS)
    with fetching(version.path):
        file_system, place = file_system_at(version.path, options)
        infos = text_infos(file_system, place)
    yield from (Unit(1, info["size"]) for info in infos)


def text_rows(shard: Shard, options: Options) -> Iterator[RawRow]:
    """The shard's rows; one file is held at a time, and none that is too long."""
    version, piece = shard.version, shard.piece
    with fetching(shard.path):
        file_system, place = file_system_at(shard.path, options)
        infos = text_infos(file_system, place)
    names = [info["name"] for info in infos]
    folder = _folder(place, names)
    for name in names[piece.start_row : piece.end_row]:
        values: dict[str | None, object] = {"id": name.removeprefix(folder)}
        if "text" in (version.text_column, version.id_column):
            values["text"] = _text(file_path(file_system, name), options)
        yield RawRow(values.get(version.text_column), values.get(version.id_column))
        del values  # a text may be long: none is held beside the next one


def text_infos(file_system: AbstractFileSystem, place: str) -> list[FileInfo]:
    """The descriptions of the regular text files, sorted by name."""
    infos = [info for info in files_at(file_system, place) if format_of(info["name"]) == "txt"]
    infos = [info for info in infos if irregularity(file_system, info) is None]
    return sorted(infos, key=lambda info: str(info["name"]))


def text_state(
    file_system: AbstractFileSystem, infos: Iterable[FileInfo], cache_dir: Path | None
) -> tuple[int, str]:
    """The size of the files together, and an etag of their names, sizes and contents.

    Without a cache, the etag of local files has their names and sizes only: it is then a prefix.
    """
    is_local = isinstance(file_system, LocalFileSystem)
    entries = sorted(
        (info["name"], info["size"], "" if is_local else remote_etag(info["name"], info))
        for info in infos
    )
    etag = short_hash(canonical_json(entries))
    if is_local and cache_dir is not None:
        contents = [content_hash(Path(name), cache_dir) for name, _, _ in entries]
        etag += f"-{short_hash(canonical_json(contents))}"
    return sum(size for _, size, _ in entries), etag


def file_path(file_system: AbstractFileSystem, name: str) -> str:
    """A file's absolute path, or its URL."""
    is_local = isinstance(file_system, LocalFileSystem)
    return name if is_local else str(file_system.unstrip_protocol(name))


def _folder(place: str, names: list[str]) -> str:
    """The folder, with a slash, that a file, a folder or a glob starts from."""
    if place not in names and all(name.startswith(f"{place}/") for name in names):
        return f"{place}/"
    start = place if place in names else re.split(r"[*?\[]", place)[0]
    return start[: start.rfind("/") + 1]


def _text(path: str, options: Options) -> bytes | TooLong:
    """The file's content without a byte order mark."""
    text = RowBuffer()
    with opened(path, options) as file:
        for block in blocks_of(file):
            text.add(block)
    data = text.take()
    return data if isinstance(data, TooLong) else data.removeprefix(codecs.BOM_UTF8)
