"""The input: which objects a path names, how each is cut into shards, and a shard's documents.

Entry points: `find_objects`, `cut`, `read_documents`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path

import pyarrow as pa
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import (
    ForeignContentError,
    MissingColumnsError,
    Problem,
    SpecError,
    UnreadableError,
    one_line,
)
from pipeline.hashes import content_hash, content_hashes
from pipeline.sources.documents import Names, RawRow, Row, slices_from
from pipeline.sources.formats import (
    READERS,
    foreign_content,
    format_of,
    of_first_kind,
    reader_of,
    supported,
)
from pipeline.sources.image_files import image_of
from pipeline.sources.listing import (
    IN_OUTPUT,
    NO_FILE,
    FileInfo,
    LeftOut,
    files_at,
    is_file,
    remote_etag,
)
from pipeline.sources.records import DELIMITERS
from pipeline.sources.shards import MAX_SHARD_BYTES, ObjectVersion, Shard, cut_units
from pipeline.sources.streams import Options, changed, check_same, fetching, reading
from pipeline.sources.table_files import lance_folder, stored_files, table_files
from pipeline.sources.text_files import WITHOUT, file_path, text_infos, text_names, text_state
from pipeline.sources.views import DataFile
from pipeline.spec.locations import table_at
from pipeline.spec.schema import Columns
from pipeline.stores.file_systems import file_system_at
from pipeline.stores.hub import PROTOCOL, pinned
from pipeline.stores.retries import option_errors, retry

logger = logging.getLogger(__name__)

_CLOCKS_APART_S = 60.0
# The protocols of stores whose paths begin with a bucket.
_BUCKETS = frozenset({"s3", "gs"})
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
    is_file: bool = True  # False of a FIFO and the like
    file: DataFile | None = None  # of a table, or of texts around the output

    def version(self, columns: Columns) -> ObjectVersion:
        """The version under which its shards are recorded."""
        view = None if self.file is None else self.file.view_of(columns)
        if self.format.partition(".")[0] not in DELIMITERS:
            columns = columns._replace(quoted=None)
        return ObjectVersion(self.path, self.size_bytes, self.etag, self.format, *columns, view)


def find_objects(
    path_glob: str, cache_dir: Path, options: Options = NO_OPTIONS, *, output: str | None = None
) -> list[InputObject]:
    """The objects that a file, a glob, a folder or a table names, sorted by path.

    A local file is hashed once (`hashes.content_hash`). All text files are one object. An entry
    that is not a file, such as a FIFO, is an object that cannot be read. `output` is the path or
    the URL of an output, which is not part of a folder or a glob.
    """
    objects: list[InputObject] = []
    if (table := table_at(path_glob) or lance_folder(path_glob, options)) is not None:
        files = table_files(table, options)
        for file, (path, info) in zip(files, stored_files(files, options), strict=True):
            etag = remote_etag(path, info) if "://" in path else ""
            own = InputObject(path, info["size"], etag, file.format, options, file=file)
            objects.append(own)
        return _hashed(objects, cache_dir)
    left_out = LeftOut()
    file_system, place, infos = find_files(path_glob, options, output=output, left_out=left_out)
    texts: list[FileInfo] = []
    is_local = isinstance(file_system, LocalFileSystem)
    for info in infos:
        path, format = file_path(file_system, info["name"]), str(format_of(info["name"]))
        if not is_file(file_system, info):
            objects.append(InputObject(path, 0, "", format, options, is_file=False))
        elif format == "txt":
            texts.append(info)
        else:
            etag = "" if is_local else remote_etag(path, info)
            objects.append(InputObject(path, info["size"], etag, format, options))
    if texts:
        path, state = file_path(file_system, place), text_state(file_system, texts, cache_dir)
        # — only if the output has such files: a view would change the ids of the shards
        is_around = any(format_of(name) == "txt" for name in left_out.get(IN_OUTPUT, ()))
        view = DataFile(path, {WITHOUT: output}, "txt") if is_around else None
        objects.append(InputObject(path, *state, "txt", options, file=view))
    return _hashed(objects, cache_dir)


def _hashed(objects: Sequence[InputObject], cache_dir: Path) -> list[InputObject]:
    """The objects sorted by path; local files, which have no etag, with that of their content."""
    local = [item.path for item in objects if item.is_file and not item.etag]
    hashes = dict(zip(local, content_hashes([*map(Path, local)], cache_dir), strict=True))
    hashed = (replace(item, etag=hashes.get(item.path, item.etag)) for item in objects)
    return sorted(hashed, key=lambda item: item.path)


def find_files(
    path_glob: str,
    options: Options = NO_OPTIONS,
    *,
    key: str = "input.path",
    output: str | None = None,
    left_out: LeftOut | None = None,
) -> tuple[AbstractFileSystem, str, list[FileInfo]]:
    """The file system, the place in it, and the description of each file that a path names.

    A folder means the files below it of the first kind that it has (`formats.Reader`). Each file
    that is named, or matched by a glob, must be supported; SpecError at `key` if one is not. What
    is left out (`listing.files_at`) is logged on one line, and added to `left_out`. A branch of a
    dataset on the Hub becomes its commit, which is then a part of every path.
    """
    left_out = LeftOut() if left_out is None else left_out
    if (table_at(path_glob) or lance_folder(path_glob, options)) is not None:
        raise SpecError([Problem(key, "a table may be read only as input.path", path_glob)])
    if path_glob.startswith(PROTOCOL):
        with option_errors("input.storage_options", options):
            path_glob = pinned(path_glob, options, key)
    with fetching(path_glob), option_errors("input.storage_options", options):
        try:
            file_system, place = file_system_at(path_glob, options)
            file_system.invalidate_cache()  # of earlier listings
            infos = files_at(file_system, place, of_first_kind, left_out, output)
        except FileNotFoundError:
            if not _lacks_bucket(file_system, place):
                raise
            infos = []
        except (ValueError, ImportError) as error:  # no such protocol, package or pattern
            fix = f"cannot be opened: {error}"
            raise SpecError([Problem(key, fix, path_glob)]) from error
        if not infos:
            fix = _no_file(file_system, place)
            if left_out:
                fix = f"names nothing but {left_out}; name a file in full, or another output"
            raise SpecError([Problem(key, fix, path_glob)])
    if left_out:
        logger.info("%s: left out: %s", key, left_out)
    names = [info["name"] for info in infos]
    if unsupported := sorted(name for name in names if format_of(name) is None):
        fix = f"{len(unsupported)} of {len(infos)} files are not {supported()}; narrow the glob"
        if len(infos) == 1:
            fix = f"this kind of file is not supported; supported are {supported()}"
        raise SpecError([Problem(key, fix, unsupported[0])])
    # — label files record the name; a local name may have other bytes than UTF-8
    shown = [os.fsencode(name).decode("utf-8", "backslashreplace") for name in names]
    if odd := sorted(one for one, name in zip(shown, names, strict=True) if one != name):
        fix = f"{len(odd)} of {len(names)} files have a name that is not UTF-8; rename them"
        raise SpecError([Problem(key, fix, odd[0])])
    return file_system, place, infos


def _no_file(file_system: AbstractFileSystem, place: str) -> str:
    """Why a path names no file, and what to write instead where that is known."""
    if _lacks_bucket(file_system, place):
        bucket = place.partition("/")[0]
        return f"there is no bucket {bucket!r}, or these credentials do not see it"
    if isinstance(file_system, LocalFileSystem) and os.path.isdir(place):
        return f"this folder has no supported file; supported are {supported()}"
    if "{" in place:
        return "names no file; globs have no {a,b}: write * or ? for what differs"
    if "[" in place:
        return "names no file; in a glob, [ab] is one character: write [[] for a [ in a name"
    if isinstance(file_system, LocalFileSystem):
        folder, name = os.path.split(place)
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        if similar := get_close_matches(name, names, n=1):
            return f"names no file; a similar name is {similar[0]!r}"
    return f"names no file; supported are {supported()}, globs and folders"


def _lacks_bucket(file_system: AbstractFileSystem, place: str) -> bool:
    has_buckets = not _BUCKETS.isdisjoint(file_system.protocol)
    return has_buckets and not file_system.exists(place.partition("/")[0])


def cut(
    source: InputObject, columns: Columns, target_bytes: int, *, lacking: bool = False
) -> list[Shard]:
    """The object's rows in shards of about `target_bytes`: every row once, in order.

    UnreadableError if the object is not a file, or is broken. MissingColumnsError if it lacks a
    column; with `lacking`, it may. SpecError if its format has no images, and they are to be read.
    """
    reader = reader_of(source.format)
    if columns.image is not None and not reader.has_images:
        others = ", ".join(other.formats[0] for other in READERS if other.has_images)
        fix = f"{source.path}: .{reader.formats[0]} files have no images; use {others}"
        raise SpecError([Problem("input.image", fix, columns.image)])
    if not source.is_file:
        raise UnreadableError(f"{source.path}: {NO_FILE}; remove it")
    version = source.version(columns)
    try:
        with reading(source.path):
            named = columns._replace(text=None, id=None, image=None) if lacking else columns
            checked = source.version(named)
            units = reader.units(checked, source.options)
            return [Shard(version, piece) for piece in cut_units(units, target_bytes)]
    except (UnreadableError, MissingColumnsError) as error:
        content = foreign_content(source.path, source.format, source.options)
        if content is None:
            raise
        fix = f"{source.path}: cannot be read: it is {content}"
        if isinstance(error, UnreadableError):
            raise ForeignContentError(fix) from error
        raise MissingColumnsError([Problem("input.path", fix)]) from error


def first_rows(path: str, format: str, options: Options, rows: int) -> Iterator[Row]:
    """The first rows of a file with all columns, except those of lists, structs and bytes."""
    reader = reader_of(format)
    version = ObjectVersion(path, 0, "", format, None, None)
    with reading(path):
        units = islice(reader.units(version, options), rows)
        shards = (Shard(version, piece) for piece in cut_units(units, MAX_SHARD_BYTES))
        yield from islice((row for s in shards for row in reader.rows(s, options, None)), rows)


def read_documents(shard: Shard, options: Options = NO_OPTIONS) -> Iterator[pa.Table]:
    """The shard's documents (`documents.SCHEMA`), one row for each of its rows, slice by slice.

    A row that cannot be read from a broken file has the reason in its status. StorageError if the
    object is not the version that was cut; it is raised instead of the last slice at the latest.
    """
    version = shard.version
    columns = version.text_column, version.id_column, version.image_column
    images = partial(image_of, path=shard.path, options=options)
    rows = read_rows(shard, options, [name for name in columns if name is not None])
    # — a loop would hold a row, whose text may be long, while the next one is read
    raw = map(partial(_raw_row, *columns), rows)
    return slices_from(raw, None if version.image_column is None else images)


def _raw_row(text: str | None, id: str | None, image: str | None, row: Row) -> RawRow:
    if row.problem is not None:
        return RawRow(id=row.place, problem=row.problem)
    values = [None if name is None else row.values.get(name) for name in (text, id, image)]
    return RawRow(text=values[0], id=values[1], image=values[2])


def read_rows(shard: Shard, options: Options, names: Names) -> Iterator[Row]:
    """These columns of the shard's rows, one row at a time; raises as `read_documents` does."""
    broken: UnreadableError | None = None
    count = 0
    try:
        with reading(shard.path):
            for row in reader_of(shard.version.format).rows(shard, options, names):
                count += 1
                yield row
                del row  # a text may be long: it is not held while the next one is read
    except UnreadableError as error:
        broken = error
    # — checked after reading, because the object may change meanwhile
    check_unchanged(shard, options)
    if broken is not None:
        reason = f"cannot be read: {one_line(broken.__cause__ or broken)[:REASON_CHARS]}"
        name = shard.path.rpartition("/")[2]
        for place in range(shard.piece.start_row + count, shard.piece.end_row):
            yield Row(problem=reason, place=f"{name}:{place}")
    elif count != shard.rows:
        start = shard.piece.start_row
        raise changed(shard.path, f": it has {count} rows instead of {shard.rows} from row {start}")


def check_unchanged(shard: Shard, options: Options) -> None:
    """StorageError if the size, or a remote object's etag, differs from the one at the cut.

    Of text files, `text_rows` checks each one that it reads.
    """
    if shard.version.format == "txt":
        return
    with fetching(shard.path):
        file_system, place = file_system_at(shard.path, options)
        file_system.invalidate_cache()  # a cached listing may be older than the change
        before = shard.version.size_bytes, shard.version.etag
        info = retry(partial(file_system.info, place))
        is_local = isinstance(file_system, LocalFileSystem)
        now = info["size"], before[1] if is_local else remote_etag(shard.path, info)
    check_same(shard.path, now, before)


def check_content(shard: Shard, cache_dir: Path, since: float) -> None:
    """StorageError if the shard's file is local, was written since, and has other content.

    Reading a local file checks only its size. `since` is in seconds since the epoch. A file is
    hashed again if it was written later, or up to a minute before, because clocks differ.
    """
    if "://" in shard.path:
        return
    is_text = shard.version.format == "txt"
    with fetching(shard.path):
        names = text_names(shard) if is_text else [shard.path]
        written = max(Path(name).stat().st_mtime for name in names)
    if written < since - _CLOCKS_APART_S:
        return
    if is_text:
        file_system = LocalFileSystem()
        infos = text_infos(file_system, shard.path, shard.version.view)
        _, etag = text_state(file_system, infos, cache_dir)
    else:
        etag = content_hash(Path(shard.path), cache_dir)
    if etag != shard.version.etag:
        raise changed(shard.path, ", with the same size")
