"""Where results are kept: objects that are created whole, once, and never changed.

Knows keys, bytes and how a store creates an object if and only if it is not there. Knows nothing
of what the objects hold. A local disk is the one store so far; another is a class that meets
`Store` and a line in `open_store`.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.errors import RefusedError, StorageError

ATTEMPTS = "attempts/"
PROBE_KEY = ATTEMPTS + "create-only-probe"
# What Linux and macOS answer where a file system has no hard links, or the root spans two of them.
_NO_LINKS = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object as a LIST shows it; `etag` changes whenever the object was written anew."""

    key: str
    size_bytes: int
    etag: str


class Store(Protocol):
    """A flat space of objects. Law: once an object is there, no `create` changes it."""

    @property
    def url(self) -> str:
        """Where the store is, as errors name it."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """True: this call made the object, whole. False: it was there; nothing was changed."""
        ...

    def read(self, key: str) -> bytes:
        """The object's content; StorageError where there is none."""
        ...

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """The objects whose key starts with `prefix`, at any depth, in the order of their keys.

        Nothing below `attempts/` unless the prefix asks for it.
        """
        ...


def open_store(url: str) -> Store:
    """The store at a local path or a file:// URL; RefusedError for any other scheme."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)
    if scheme is None:
        return LocalStore(Path(os.path.abspath(Path(url).expanduser())))
    if scheme[1].lower() != "file":
        raise RefusedError(
            f"output: {scheme[0]} is not a store that can be written yet; "
            f"write a local path or file:///absolute/path (got {url!r})"
        )
    path = Path(url[scheme.end() :])
    if not path.is_absolute():
        raise RefusedError(f"output: write file:///absolute/path, three slashes (got {url!r})")
    return LocalStore(path)


def check_create_only(store: Store) -> None:
    """RefusedError if a second create of one key is let through: such a store loses results."""
    # — one key for all runs: it need not be deleted, which a store cannot do, nor does it pile up
    store.create(PROBE_KEY, b"the first create of a key stands")
    before = store.read(PROBE_KEY)
    again = store.create(PROBE_KEY, b"a second create: " + uuid.uuid4().bytes)
    if again or store.read(PROBE_KEY) != before:
        raise RefusedError(
            f"{store.url}: a second create of {PROBE_KEY} was not refused, so one run could "
            f"overwrite another's results; use a store that honours conditional create"
        )


@dataclass(frozen=True, slots=True)
class LocalStore:
    """A folder on a local disk. A hard link is the create: it is atomic and never overwrites."""

    root: Path

    @property
    def url(self) -> str:
        """The folder's path."""
        return str(self.root)

    def create(self, key: str, data: bytes) -> bool:
        """True: this call made the object, whole and durable. False: it was there."""
        final = self._path(key)
        temporary = self.root / ATTEMPTS / f"create-{uuid.uuid4().hex}"
        try:
            _make_folder(temporary.parent)
            _make_folder(final.parent)
            try:
                _write_durably(temporary, data)
                return _link(temporary, final)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{final}: cannot be written: {error.strerror}") from error

    def read(self, key: str) -> bytes:
        """The object's content."""
        path = self._path(key)
        try:
            return path.read_bytes()
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {error.strerror}") from error

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """The objects whose key starts with `prefix`, in the order of their keys."""
        if prefix:
            _check_key(prefix.removesuffix("/"))
        attempts_too = prefix.startswith(ATTEMPTS)
        folder = self.root / prefix.rpartition("/")[0]
        try:
            keys = sorted(file.relative_to(self.root).as_posix() for file in _files(folder))
            for key in keys:
                if key.startswith(prefix) and (attempts_too or not key.startswith(ATTEMPTS)):
                    yield from self._stored(key)
        except OSError as error:
            raise StorageError(f"{folder}: cannot be listed: {error.strerror}") from error

    def _stored(self, key: str) -> Iterator[StoredObject]:
        try:
            status = (self.root / key).lstat()
        except FileNotFoundError:  # gone since the folder was read, so it is not there
            return
        if stat.S_ISREG(status.st_mode):
            yield StoredObject(key, status.st_size, f"{status.st_size:x}-{status.st_mtime_ns:x}")

    def _path(self, key: str) -> Path:
        _check_key(key)
        return self.root / key


def _check_key(key: str) -> None:
    parts = key.split("/")
    if "\0" in key or "\\" in key or any(part in ("", ".", "..") for part in parts):
        raise StorageError(f"{key!r} is not a key: write names joined by single slashes, no '..'")


def _files(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    # — os.walk drops a folder that it may not read unless told otherwise: objects would be missed
    for place, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(place, name) for name in names)


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _link(temporary: Path, final: Path) -> bool:
    """True: `final` now names the file. False: something had that name, and keeps it."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise RefusedError(
            f"{final}: this file system makes no hard links ({error.strerror}), without which "
            f"one run could overwrite another's results; use ext4, xfs, apfs or NFS"
        ) from error
    finally:
        # — also for a name that another process made and may not have synced yet
        _sync_folder(final.parent)
    return True


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents so that their names, too, survive a power cut."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        _sync_folder(place.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
