"""The files that a path names, and an etag that changes with a file.

Entry points: `files_at`, `irregularity`, `remote_etag`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import partial
from glob import escape
from itertools import chain
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import StorageError
from pipeline.sources.streams import retry_transient

FileInfo = Mapping[str, Any]  # a file system's description of a file

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


LISTINGS_AT_ONCE = 16
# The parts of a glob, each up to the end of a name with a wildcard.
_STEPS = re.compile(r"[^*?\[]*[*?\[][^/]*|[^*?\[]+$")


def files_at(
    file_system: AbstractFileSystem,
    place: str,
    of_folder: Callable[[Iterable[FileInfo]], Iterable[FileInfo]] = iter,
) -> Iterator[FileInfo]:
    """The file system's description of each file that `place` names.

    `of_folder` chooses among the files below a folder; by default they are all named.
    """
    itself: FileInfo | None = None
    with suppress(FileNotFoundError):
        # — first, so that a file with a bracket in its name is not taken for a glob
        itself = retry_transient(partial(file_system.info, place))
    if itself is None:
        if any(sign in place for sign in "*?["):
            matched = _matched(file_system, place)
            yield from (info for info in matched if info["type"] != "directory")
    elif itself["type"] == "directory":
        below = retry_transient(partial(file_system.find, place, detail=True)).values()
        yield from of_folder(below)
    else:
        yield itself


def _matched(file_system: AbstractFileSystem, pattern: str) -> Collection[FileInfo]:
    """What a glob matches. In a remote store, the folders of one level are listed in parallel.

    fsspec would list one folder after another, also those that the pattern does not match.
    """
    steps = _STEPS.findall(pattern)
    if isinstance(file_system, LocalFileSystem):
        steps = [pattern]
    last = next((number for number, step in enumerate(steps) if "**" in step), len(steps) - 1)
    entries: dict[str, FileInfo] = {"": {"type": "directory"}}
    with ThreadPoolExecutor(LISTINGS_AT_ONCE) as pool:
        for step in [*steps[:last], "".join(steps[last:])]:
            folders = [name for name, info in entries.items() if info["type"] == "directory"]
            globs = (partial(file_system.glob, escape(f) + step, detail=True) for f in folders)
            entries = dict(chain.from_iterable(b.items() for b in pool.map(retry_transient, globs)))
    return entries.values()


def irregularity(file_system: AbstractFileSystem, info: FileInfo) -> str | None:
    """What a local entry is that is not a file, as `a FIFO`; None of a file, or a link to one.

    Reading such an entry might never end.
    """
    if not isinstance(file_system, LocalFileSystem) or info["type"] == "file":
        return None
    try:
        mode = os.stat(info["name"]).st_mode
    except OSError as error:
        return f"a link that leads nowhere ({error.strerror})"
    return _IRREGULAR.get(stat.filemode(mode)[0], "no file") if not stat.S_ISREG(mode) else None


# By the first character of `ls -l`.
_IRREGULAR = {"p": "a FIFO", "s": "a socket", "c": "a device", "b": "a device", "d": "a folder"}


def remote_etag(path: str, info: FileInfo) -> str:
    """An etag that changes with the content of a remote file, or at least with its time."""
    if info["size"] is None:
        raise StorageError(
            f"{path}: the server does not send the file's size; copy the file to a disk or an "
            f"object store"
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
