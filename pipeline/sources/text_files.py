"""Text files, one document each. All text files that a path names are one object with many rows.

Entry points: `text_units`, `text_rows`, and `text_state`, the identity of such an object. A shard
thus holds many small files. Its rows have the columns `text`, and `id`: the file's path below the
folder that is named, or that the glob starts from.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.hashes import canonical_json, content_hashes, parse_json, short_hash
from pipeline.sources.documents import MAX_ROW_BYTES, Names, Row, TooLong
from pipeline.sources.listing import FileInfo, LeftOut, files_at, is_file, remote_etag, split_glob
from pipeline.sources.shards import ObjectVersion, Shard, Unit, check_columns
from pipeline.sources.streams import Options, check_same, fetching
from pipeline.stores.file_systems import file_system_at
from pipeline.stores.retries import retry

COLUMNS = ["text", "id"]
WITHOUT = "without"  # in the view of an object: the output, which is not a part of it
LFS_POINTER = b"version https://git-lfs"


def text_units(version: ObjectVersion, options: Options) -> Iterator[Unit]:
    """One unit for each file; no file is opened."""
    check_columns(version, COLUMNS)
    with fetching(version.path):
        file_system, place = file_system_at(version.path, options)
        infos = text_infos(file_system, place, version.view)
    yield from (Unit(1, info["size"]) for info in infos)


def text_rows(shard: Shard, options: Options, names: Names) -> Iterator[Row]:
    """The shard's rows; one file is held at a time, and none that is too long."""
    file_system, folder, files = _files_of(shard, options)
    has_text = names is None or "text" in names
    for file in files:
        id = {"id": file[0].removeprefix(folder)}
        text: dict[str, object] = {"text": _text(file_system, file)} if has_text else {}
        is_pointer = isinstance(data := text.get("text"), bytes) and data.startswith(LFS_POINTER)
        yield Row(id | text, problem="a Git LFS pointer" if is_pointer else None, place=id["id"])


def text_names(shard: Shard) -> list[str]:
    """The names of a local shard's files."""
    return [name for name, _, _ in _files_of(shard, {})[2]]


def _files_of(shard: Shard, options: Options) -> tuple[AbstractFileSystem, str, Sequence[_File]]:
    """The file system, the folder and the shard's files; StorageError if there are other files."""
    with fetching(shard.path):
        file_system, place = file_system_at(shard.path, options)
        # — a preview has no version, so its listing is not cached
        listed = _listed if shard.version.etag else _listed.__wrapped__
        folder, files = listed(shard.version, file_system, place)
    return file_system, folder, files[shard.piece.start_row : shard.piece.end_row]


@lru_cache(maxsize=4)
def _listed(
    version: ObjectVersion, file_system: AbstractFileSystem, place: str
) -> tuple[str, list[_File]]:
    """The folder and the files of this version, listed once in a process: a shard has few."""
    file_system.invalidate_cache()  # of earlier listings
    files = _entries(file_system, text_infos(file_system, place, version.view))
    file_system.invalidate_cache()  # a file that is read is looked at again
    now = sum(size for _, size, _ in files), short_hash(canonical_json(files))
    if version.etag:
        check_same(version.path, now, (version.size_bytes, version.etag.partition("-")[0]))
    is_local = isinstance(file_system, LocalFileSystem)
    return _folder(place, [name for name, _, _ in files], is_local=is_local), files


def text_infos(file_system: AbstractFileSystem, place: str, view: str | None) -> list[FileInfo]:
    """The descriptions of the regular text files, sorted by name.

    `view` is that of their object: it has the output, where that is below the place and has texts.
    """
    output = parse_json(view or "{}").get(WITHOUT)
    infos = texts_of(files_at(file_system, place, texts_of, LeftOut(), output))
    infos = (info for info in infos if is_file(file_system, info))
    return sorted(infos, key=lambda info: str(info["name"]))


def texts_of(infos: Iterable[FileInfo]) -> Iterator[FileInfo]:
    """The text files among these."""
    return (info for info in infos if str(info["name"]).lower().endswith(".txt"))


def text_state(
    file_system: AbstractFileSystem, infos: Iterable[FileInfo], cache_dir: Path
) -> tuple[int, str]:
    """The size of the files together, and an etag of their names, sizes and contents."""
    files = _entries(file_system, infos)
    etag = short_hash(canonical_json(files))
    if isinstance(file_system, LocalFileSystem):
        contents = content_hashes([Path(name) for name, _, _ in files], cache_dir)
        etag += f"-{short_hash(canonical_json(contents))}"
    return sum(size for _, size, _ in files), etag


_File = tuple[str, int, str]  # its name, size and etag, which is empty for a local file


def _entries(file_system: AbstractFileSystem, infos: Iterable[FileInfo]) -> list[_File]:
    is_local = isinstance(file_system, LocalFileSystem)
    return sorted(
        (info["name"], info["size"], "" if is_local else remote_etag(info["name"], info))
        for info in infos
    )


def file_path(file_system: AbstractFileSystem, name: str) -> str:
    """A file's absolute path, or its URL."""
    is_local = isinstance(file_system, LocalFileSystem)
    return name if is_local else str(file_system.unstrip_protocol(name))


def _folder(place: str, names: list[str], *, is_local: bool) -> str:
    """The folder, with a slash, that a file, a folder or a glob starts from."""
    if place not in names and all(name.startswith(f"{place}/") for name in names):
        return f"{place}/"
    if place in names:
        return place[: place.rfind("/") + 1]
    return split_glob(place, is_local=is_local)[0]


def _text(file_system: AbstractFileSystem, file: _File) -> bytes | TooLong:
    """The file's content without a byte order mark; StorageError if the file has changed."""
    name, size_bytes, _ = file
    path = file_path(file_system, name)
    data = b""
    with fetching(path):
        if size_bytes <= MAX_ROW_BYTES:
            data = retry(partial(file_system.cat_file, name))
        info = retry(partial(file_system.info, name))
    [now] = _entries(file_system, [info])
    check_same(path, now[1:], file[1:])
    return TooLong() if size_bytes > MAX_ROW_BYTES else data.removeprefix(codecs.BOM_UTF8)
