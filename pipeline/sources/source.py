"""The input: which objects a path names, how each is cut into shards, and a shard's documents.

Entry points: `find_objects`, `cut`, `read_documents`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import stringify_path

from pipeline.errors import Problem, SpecError, StorageError, UnreadableError
from pipeline.hashes import content_hash
from pipeline.sources.delimited import delimited_rows, delimited_units
from pipeline.sources.documents import RawRow, slices_from
from pipeline.sources.json_array import json_rows, json_units
from pipeline.sources.jsonl import jsonl_rows, jsonl_units
from pipeline.sources.shards import ObjectVersion, Shard, cut_units
from pipeline.sources.streams import Options, fetching, one_line, reading, retry_transient
from pipeline.sources.tables import table_rows, table_units
from pipeline.sources.wet import wet_rows, wet_units
from pipeline.stores.retries import option_errors

# By format: the function that measures an object's units, and the one that reads a shard's rows.
_READERS = {
    "parquet": (table_units, table_rows),
    **dict.fromkeys(("jsonl", "jsonl.gz", "jsonl.zst"), (jsonl_units, jsonl_rows)),
    "arrow": (table_units, table_rows),
    "warc.wet.gz": (wet_units, wet_rows),
    **dict.fromkeys(("csv", "csv.gz", "csv.zst"), (delimited_units, delimited_rows)),
    **dict.fromkeys(("tsv", "tsv.gz", "tsv.zst"), (delimited_units, delimited_rows)),
    **dict.fromkeys(("json", "json.gz", "json.zst"), (json_units, json_rows)),
}
FORMATS = tuple(_READERS)
SUPPORTED = " ".join(f".{format}" for format in FORMATS)
# A folder names its files of the first of these kinds that it has. Files of the later kinds often
# describe the others: a card, a list of features, a licence.
_KINDS = (("parquet", "jsonl", "arrow", "warc"), ("csv", "tsv"), ("json",))
# Keys of remote file systems for a hash of the content, and for the modification time.
_CONTENT_KEYS = ("ETag", "etag", "md5Hash", "md5", "blob_id", "checksum")
_TIME_KEYS = (
    "LastModified",
    "last_modified",
    "Last-Modified",
    "updated",
    "mtime",
    "modified",
    "created",
)
_CLOCKS_APART_S = 60.0
NO_OPTIONS: Options = {}
# The length of the reason in each row of a file that cannot be read.
REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class InputObject:
    """One version of one input file."""

    path: str  # absolute, or a URL
    size_bytes: int
    etag: str
    format: str
    options: Options = field(default_factory=dict)  # to open it; not part of its identity

    def version(self, text_column: str, id_column: str | None) -> ObjectVersion:
        """The version under which its shards are recorded."""
        return ObjectVersion(
            self.path, self.size_bytes, self.etag, self.format, text_column, id_column
        )


def find_objects(
    path_glob: str, cache_dir: Path, options: Options = NO_OPTIONS
) -> list[InputObject]:
    """The objects that a file, a glob or a folder names, sorted by path.

    A folder means the supported files below it; CSV and TSV only if it has no Parquet, Arrow, JSON
    lines or WET, and JSON arrays only if it has none of those. Each file that is named, or matched
    by a glob, must be supported. A local file is hashed once (`hashes.content_hash`).
    """
    with fetching(path_glob), option_errors("input.storage_options", options):
        try:
            file_system, place = url_to_fs(path_glob, **options)
            file_system.invalidate_cache()  # forgets what it listed before
        except (ValueError, ImportError) as error:  # no such protocol, or package not installed
            fix = f"cannot be opened: {error}"
            raise SpecError([Problem("input.path", fix, path_glob)]) from error
        infos = list(_infos(file_system, stringify_path(place)))
    if not infos:
        fix = f"names no file; supported are {SUPPORTED}, globs and folders"
        raise SpecError([Problem("input.path", fix, path_glob)])
    names = [info["name"] for info in infos]
    if unsupported := sorted(name for name in names if format_of(name) is None):
        fix = f"{len(unsupported)} of {len(infos)} files are not {SUPPORTED}; narrow the glob"
        raise SpecError([Problem("input.path", fix, unsupported[0])])
    # — label files record the name; a local name may have other bytes than UTF-8
    shown = [os.fsencode(name).decode("utf-8", "backslashreplace") for name in names]
    if odd := sorted(one for one, name in zip(shown, names, strict=True) if one != name):
        fix = f"{len(odd)} of {len(names)} files have a name that is not UTF-8; rename them"
        raise SpecError([Problem("input.path", fix, odd[0])])
    objects = [_input_object(file_system, info, cache_dir, options) for info in infos]
    return sorted(objects, key=lambda each: each.path)


def cut(
    source: InputObject, text_column: str, id_column: str | None, target_bytes: int
) -> list[Shard]:
    """The object's rows in shards of about `target_bytes`: every row once, in order."""
    version = source.version(text_column, id_column)
    with reading(source.path):
        measured_units, _ = _READERS[source.format]
        units = measured_units(version, source.options)
        return [Shard(version, piece) for piece in cut_units(units, target_bytes)]


def read_documents(shard: Shard, options: Options = NO_OPTIONS) -> Iterator[pa.Table]:
    """The shard's documents (`documents.SCHEMA`), one row for each of its rows, slice by slice.

    A row that cannot be read from a broken file has the reason in its status. StorageError if the
    object is not the version that was cut; it is raised instead of the last slice at the latest.
    """
    return slices_from(every_row(shard, options))


def format_of(path: str) -> str | None:
    """The supported format that a file's name ends in, or None."""
    name = path.lower()
    return next((format for format in FORMATS if name.endswith(f".{format}")), None)


def every_row(shard: Shard, options: Options) -> Iterator[RawRow]:
    """The shard's rows as their file has them, one at a time; raises as `read_documents` does."""
    _check_unchanged(shard, options)
    broken: UnreadableError | None = None
    count = 0
    try:
        with reading(shard.path):
            _, rows_of = _READERS[shard.version.format]
            for row in rows_of(shard, options):
                count += 1
                yield row
                del row  # a text may be long: it is not held while the next one is read
    except UnreadableError as error:
        broken = error
    # — checked again, because the object may have changed before it was opened
    _check_unchanged(shard, options)
    if broken is not None:
        yield from _unread_rows(shard, count, broken)
    elif count != shard.rows:
        raise StorageError(
            f"{shard.path}: changed while the job ran: it has {count} rows instead of "
            f"{shard.rows} from row {shard.piece.start_row}; run again to label the new version"
        )


def _unread_rows(shard: Shard, count: int, error: UnreadableError) -> Iterator[RawRow]:
    """The rows after the first `count`, with their place as id and the reason as problem."""
    name = shard.path.rpartition("/")[2]
    reason = one_line(error.__cause__ or error)[:REASON_CHARS]
    for row in range(shard.piece.start_row + count, shard.piece.end_row):
        yield RawRow(id=f"{name}:{row}", problem=f"cannot be read: {reason}")


def _infos(file_system: AbstractFileSystem, place: str) -> Iterator[Mapping[str, Any]]:
    """The file system's description of each file that `place` names."""
    itself: Mapping[str, Any] | None = None
    with suppress(FileNotFoundError):
        # — first, so that a file with a bracket in its name is not taken for a glob
        itself = retry_transient(partial(file_system.info, place))
    if itself is None:
        if any(sign in place for sign in "*?["):
            matched = retry_transient(partial(file_system.glob, place, detail=True)).values()
            yield from (info for info in matched if info["type"] != "directory")
    elif itself["type"] == "directory":
        below = retry_transient(partial(file_system.find, place, detail=True)).values()
        yield from _of_first_kind(below)
    else:
        yield itself


def _of_first_kind(infos: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The files of the first of `_KINDS` that occurs."""
    kinds: list[list[Mapping[str, Any]]] = [[] for _ in _KINDS]
    for info in infos:
        family = (format_of(info["name"]) or "").partition(".")[0]
        for of_kind, families in zip(kinds, _KINDS, strict=True):
            if family in families:
                of_kind.append(info)
    return next(filter(None, kinds), [])


def _input_object(
    file_system: AbstractFileSystem, info: Mapping[str, Any], cache_dir: Path, options: Options
) -> InputObject:
    name, size_bytes = info["name"], info["size"]
    format = format_of(name)
    assert format is not None, name
    if isinstance(file_system, LocalFileSystem):
        return InputObject(name, size_bytes, content_hash(Path(name), cache_dir), format, options)
    path = file_system.unstrip_protocol(name)
    return InputObject(path, size_bytes, _remote_etag(path, info), format, options)


def _check_unchanged(shard: Shard, options: Options) -> None:
    """StorageError if the size, or a remote object's etag, differs from the one at the cut."""
    with fetching(shard.path):
        file_system, place = url_to_fs(shard.path, **options)
        file_system.invalidate_cache()  # a cached listing may be older than the change
        info = retry_transient(partial(file_system.info, place))
    size_bytes, etag = shard.version.size_bytes, shard.version.etag
    is_local = isinstance(file_system, LocalFileSystem)
    now = info["size"], etag if is_local else _remote_etag(shard.path, info)
    if now != (size_bytes, etag):
        raise StorageError(
            f"{shard.path}: changed while the job ran: size and etag are {now}, and were "
            f"{(size_bytes, etag)}; run again to label the new version"
        )


def check_content(shard: Shard, cache_dir: Path, since: float) -> None:
    """StorageError if the shard's file is local, was written since, and has other content.

    Reading a local file checks only its size. `since` is in seconds since the epoch. A file is
    hashed again if it was written later, or up to a minute before, because clocks differ.
    """
    if "://" in shard.path:
        return
    with fetching(shard.path):
        written = Path(shard.path).stat().st_mtime
    if written < since - _CLOCKS_APART_S:
        return
    if content_hash(Path(shard.path), cache_dir) != shard.version.etag:
        raise StorageError(
            f"{shard.path}: changed while the job ran, with the same size; run again to "
            f"label the new version"
        )


def _remote_etag(path: str, info: Mapping[str, Any]) -> str:
    if info["size"] is None:
        raise StorageError(
            f"{path}: its server does not send its size; copy it to a disk or an object store"
        )
    for key in _CONTENT_KEYS:
        if info.get(key):
            return str(info[key]).strip('"')
    for key in _TIME_KEYS:
        if time := info.get(key):
            # — the same file system gives a number in a listing and a datetime for one file
            seconds = time.timestamp() if isinstance(time, datetime) else time
            return f"{seconds}-{info['size']}"
    raise StorageError(
        f"{path}: its file system has neither a hash nor a modification time, so a changed file "
        f"would not be noticed; copy the files to a disk or an object store"
    )
