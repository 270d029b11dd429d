"""The files that a path names, and an etag that changes with a file.

Entry points: `files_at`, `is_file`, `remote_etag`, `content_etag`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from fnmatch import fnmatchcase
from functools import cache, partial
from glob import escape
from itertools import chain
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import StorageError
from pipeline.stores.retries import Cause, cause_of, retry

FileInfo = Mapping[str, Any]  # a file system's description of a file

# Keys of remote file systems for a hash of the content, and for the modification time. On GCS, the
# etag changes with an object's metadata.
_CONTENT_KEYS = ("ETag", "md5Hash", "etag", "md5", "blob_id", "checksum")
_TIME_KEYS = (
    "LastModified",
    "last_modified",
    "Last-Modified",
    "updated",
    "mtime",
    "modified",
    "created",
)

# Names that programs give to files that are not data: unfinished jobs, editors, version control,
# table formats, and the caches of Hugging Face's `datasets`.
_HIDDEN = re.compile(r"[._].*|cache-.*\.arrow")
_WILDCARD = re.compile(r"[*?\[]")
LISTINGS_AT_ONCE = 16
# The parts of a glob, each up to the end of a name with a wildcard.
_STEPS = re.compile(r"[^*?\[]*[*?\[][^/]*|[^*?\[]+$")


IN_OUTPUT = "in the output"


class LeftOut(dict[str, set[str]]):
    """Paths below a folder or a glob that are not part of the input, by what they are."""

    def add(self, kind: str, path: str) -> None:
        self.setdefault(kind, set()).add(path)

    def __str__(self) -> str:
        kinds = self.items()
        return ", ".join(f"{len(paths):,} {kind} (such as {min(paths)!r})" for kind, paths in kinds)


def files_at(
    file_system: AbstractFileSystem,
    place: str,
    of_folder: Callable[[Iterable[FileInfo]], Iterable[FileInfo]],
    left_out: LeftOut,
    output: str | None = None,
) -> list[FileInfo]:
    """The file system's description of each file that `place` names.

    Below a folder or a glob, hidden names and the files of `output` are left out. A part of the
    glob that begins as a hidden name does names it. On a disk, linked folders are followed, and a
    file with two names is one file. `of_folder` chooses among the files below a folder, and the
    others are left out.
    """
    itself: FileInfo | None = None
    try:
        # — first, so that a file with a bracket in its name is not taken for a glob
        itself = retry(partial(file_system.info, place))
    except FileNotFoundError as error:
        # — with 401 and 403, servers such as the Hub answer for files that they do not have
        if cause_of(error) in (Cause.BUSY, Cause.OTHER):
            raise
    is_folder = itself is not None and itself["type"] == "directory"
    if itself is not None and not is_folder:
        return [itself]
    is_local = isinstance(file_system, LocalFileSystem)
    root, glob = (place, "**") if is_folder else split_glob(place, is_local=is_local)
    if not _WILDCARD.search(glob):
        return []
    named = [part for part in glob.split("/") if _HIDDEN.match(part)]
    hidden_part = partial(_hidden_part, root=root, named=named)
    lister = _Disk(root, hidden_part, left_out) if is_local else file_system
    if is_folder:
        infos = retry(partial(lister.find, place, detail=True)).values()
    else:
        infos = _matched(lister, escape(root) + glob)
    path_of = cache(os.path.realpath if is_local else file_system.unstrip_protocol)
    own = None if output is None else f"{path_of(output) if is_local else output}/"
    if own is not None and f"{path_of(root.rstrip('/'))}/".startswith(own):
        own = None  # — a path in the output names its files
    files: list[FileInfo] = []
    for info in infos:
        if (hidden := hidden_part(info["name"])) is not None:
            left_out.add("hidden", hidden)
        elif own is not None and path_of(info["name"]).startswith(own):
            left_out.add(IN_OUTPUT, info["name"])
        elif info["type"] != "directory":
            files.append(info)
    chosen = list(of_folder(files)) if is_folder else files
    names = {info["name"] for info in chosen}
    for info in files if chosen else ():
        if info["name"] not in names:
            left_out.add("of another kind", info["name"])
    return list(_once(chosen, path_of, left_out))


def split_glob(place: str, *, is_local: bool) -> tuple[str, str]:
    """The folder that a glob starts from, and the glob below it.

    A local folder with a wildcard in its name is taken for itself, as a file is.
    """
    fixed, parts = "", (re.sub("/+", "/", place) if is_local else place).split("/")
    while len(parts) > 1:
        folder = fixed + parts[0]
        if _WILDCARD.search(parts[0]) and not (is_local and os.path.isdir(folder)):
            break
        fixed = f"{folder}/"
        del parts[0]
    return fixed, "/".join(parts)


def _hidden_part(path: str, root: str, named: Collection[str]) -> str | None:
    """What is below the root, up to the first hidden name that no part of the glob names."""
    parts = path.removeprefix(root).split("/") if path.startswith(root) else []
    for length, part in enumerate(parts, start=1):
        if _HIDDEN.fullmatch(part) and not any(fnmatchcase(part, own) for own in named):
            return "/".join(parts[:length]).lstrip("/")
    return None


class _Disk(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The local disk, with links to folders as folders. Each folder is followed once."""

    cachable = False

    def __init__(
        self, root: str, hidden_part: Callable[[str], str | None], left_out: LeftOut
    ) -> None:
        super().__init__()
        self._followed = {os.path.realpath(root)}
        self._hidden_part, self._left_out = hidden_part, left_out

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> list[Any]:
        """What is in a folder; for fsspec alone, a link to a folder is a file."""
        infos = []
        for info in sorted(super().ls(path, detail=True), key=lambda info: str(info["name"])):
            name = info["name"]
            if info["islink"] and os.path.isdir(name) and self._hidden_part(name) is None:
                target = os.path.realpath(name)
                if target in self._followed:
                    self._left_out.add("links to what is there", name)
                    continue
                self._followed.add(target)
                info["type"] = "directory"
            infos.append(info)
        return infos if detail else [info["name"] for info in infos]


def _once(
    infos: Iterable[FileInfo], path_of: Callable[[str], str], left_out: LeftOut
) -> Iterator[FileInfo]:
    """Each file once: by its own name, or by the first of the names that links give it."""
    paths: set[str] = set()
    for info in sorted(
        infos, key=lambda info: (path_of(info["name"]) != info["name"], info["name"])
    ):
        if path_of(info["name"]) in paths:
            left_out.add("links to what is there", info["name"])
        else:
            paths.add(path_of(info["name"]))
            yield info


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
            entries = dict(chain.from_iterable(b.items() for b in pool.map(retry, globs)))
    return entries.values()


# What a local entry is of which `is_file` is false; reading it might never end.
NO_FILE = "is no file, but a FIFO, a device, or a link that leads nowhere"


def is_file(file_system: AbstractFileSystem, info: FileInfo) -> bool:
    """Whether an entry is a file, or a link to one."""
    is_local = isinstance(file_system, LocalFileSystem)
    return not is_local or info["type"] == "file" or os.path.isfile(info["name"])


def content_etag(info: FileInfo) -> str:
    """The store's hash of a file's content; empty where it has none."""
    return next((str(info[key]).strip('"') for key in _CONTENT_KEYS if info.get(key)), "")


def remote_etag(path: str, info: FileInfo) -> str:
    """An etag that changes with the content of a remote file, or at least with its time."""
    if info["size"] is None:
        raise StorageError(
            f"{path}: the server does not send the file's size; copy the file to a disk or an "
            f"object store"
        )
    if etag := content_etag(info):
        return etag
    for key in _TIME_KEYS:
        if time := info.get(key):
            # — the same file system gives a number in a listing and a datetime for one file
            seconds = time.timestamp() if isinstance(time, datetime) else time
            return f"{seconds}-{info['size']}"
    raise StorageError(
        f"{path}: its file system has neither a hash nor a modification time, so a changed file "
        f"would not be noticed; copy the files to a disk or an object store"
    )
