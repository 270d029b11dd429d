"""The store on a local disk: a folder whose files are created by a hard link.

Knows files, links and what makes them last. Knows nothing of what the objects hold.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import RefusedError, StorageError
from pipeline.stores.store import ATTEMPTS, StoredObject, check_key, check_prefix, is_listed

# What Linux and macOS answer where a file system has no hard links, or the root spans two of them.
_NO_LINKS = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
)

CREATE_TRIES = 10


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
        try:
            for _ in range(CREATE_TRIES - 1):
                # — another process may delete the last object of a folder, and the folder with it
                with suppress(FileNotFoundError):
                    return self._create(final, data)
            return self._create(final, data)
        except OSError as error:
            raise StorageError(f"{final}: cannot be written: {error.strerror}") from error

    def read(self, key: str) -> bytes:
        """The object's content."""
        path = self._path(key)
        try:
            return path.read_bytes()
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {error.strerror}") from error

    def delete(self, keys: Sequence[str]) -> None:
        """The objects are gone; one that was not there is no error."""
        for key in keys:
            path = self._path(key)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StorageError(f"{path}: cannot be deleted: {error.strerror}") from error
            self._drop_empty(path.parent)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """The objects whose key starts with `prefix`, in the order of their keys."""
        check_prefix(prefix)
        folder = self.root / prefix.rpartition("/")[0]
        try:
            keys = sorted(file.relative_to(self.root).as_posix() for file in _files(folder))
            for key in keys:
                if is_listed(key, prefix):
                    yield from self._stored(key)
        except OSError as error:
            raise StorageError(f"{folder}: cannot be listed: {error.strerror}") from error

    def _create(self, final: Path, data: bytes) -> bool:
        temporary = self.root / ATTEMPTS / f"create-{uuid.uuid4().hex}"
        _make_folder(temporary.parent)
        _make_folder(final.parent)
        try:
            _write_durably(temporary, data)
            return _link(temporary, final)
        finally:
            temporary.unlink(missing_ok=True)

    def _drop_empty(self, folder: Path) -> None:
        """A folder goes with its last object, as it does in a store without folders."""
        while folder != self.root:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent

    def _stored(self, key: str) -> Iterator[StoredObject]:
        try:
            status = (self.root / key).lstat()
        except FileNotFoundError:  # gone since the folder was read, so it is not there
            return
        if stat.S_ISREG(status.st_mode):
            yield StoredObject(key, status.st_size, f"{status.st_size:x}-{status.st_mtime_ns:x}")

    def _path(self, key: str) -> Path:
        check_key(key)
        return self.root / key


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
        # — a network disk can lose the reply to a link that it made, and is then asked again
        return temporary.samefile(final)
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
