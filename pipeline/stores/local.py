"""The store on a local disk: a folder. A hard link creates each object, atomically and durably.

Also files and folders of one process (`unfinished`, `own_folder`), which are locked until it ends:
those of a process that was killed are deleted later.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import RefusedError, StorageError
from pipeline.stores.store import ATTEMPTS, StoredObject, check_key, check_prefix, is_listed

# The errors of Linux and macOS if a file system has no hard links or the folder spans two of them.
_NO_LINKS = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
)

CREATE_TRIES = 10
# The name of a file that `unfinished` made.
_UNFINISHED = re.compile(r"(create-|assay-|\..*\.)[0-9a-f]{32}")
_FOLDER = "assay-ray-"  # and a random name: a folder of `own_folder`


@dataclass(frozen=True, slots=True)
class LocalStore:
    """A folder on a local disk. A hard link is atomic and never overwrites."""

    root: Path

    @property
    def url(self) -> str:
        return str(self.root)

    def create(self, key: str, data: bytes) -> str | None:
        final = self._path(key)
        with _disk_errors(final, "written"):
            for _ in range(CREATE_TRIES - 1):
                # — another process may delete the last object of a folder, and then the folder;
                # `mkdir` reports a folder that goes away meanwhile as one that exists
                with suppress(FileNotFoundError, FileExistsError):
                    return self._create(final, data)
            return self._create(final, data)

    def read(self, key: str) -> bytes:
        path = self._path(key)
        with _disk_errors(path, "read"):
            return path.read_bytes()

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            path = self._path(key)
            with _disk_errors(path, "deleted"):
                path.unlink(missing_ok=True)
            self._drop_empty(path.parent)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        check_prefix(prefix)
        folder = self.root / prefix.rpartition("/")[0]
        with _disk_errors(folder, "listed"):
            keys = sorted(file.relative_to(self.root).as_posix() for file in _files(folder))
            for key in keys:
                if is_listed(key, prefix):
                    with suppress(FileNotFoundError):  # deleted since the folder was read
                        status = (self.root / key).lstat()
                        yield StoredObject(key, _size(status), _etag(status), status.st_mtime)

    def _create(self, final: Path, data: bytes) -> str | None:
        _make_folder(self.root / ATTEMPTS)
        _make_folder(final.parent)
        with unfinished(self.root / ATTEMPTS / "create-") as (temporary, file):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            etag = _etag(os.fstat(file.fileno()))
            return etag if _link(temporary, final) else None

    def _drop_empty(self, folder: Path) -> None:
        """Deletes folders that are empty now: a store without folders would not show them."""
        while folder != self.root:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent

    def _path(self, key: str) -> Path:
        check_key(key)
        return self.root / key


def _size(status: os.stat_result) -> int:
    """The size in bytes; 0 of what is not a file, such as a link: it has no content of its own."""
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _etag(status: os.stat_result) -> str:
    """The etag of a file; a copy of it may have another time, and so another etag."""
    return f"{_size(status):x}-{status.st_mtime_ns:x}"


@contextmanager
def unfinished(start: Path, mode: int = 0o666) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file whose name begins with `start`; it is deleted at the end, unless it was renamed.

    A lock shows to `drop_unfinished` that its process is alive.
    """
    while True:
        path = start.with_name(start.name + uuid.uuid4().hex)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        with suppress(OSError):  # a file system without locks: nothing there is dropped
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists():  # — not dropped before it had its lock
            break
        os.close(descriptor)
    try:
        with open(descriptor, "w+b") as file:
            yield path, file
    finally:
        path.unlink(missing_ok=True)


def drop_unfinished(paths: Iterable[Path]) -> None:
    """Deletes those of the files that a process of this user left unfinished when it was killed."""
    for path in paths:
        if _UNFINISHED.fullmatch(path.name):
            with suppress(OSError), _locked(path, os.O_RDWR | os.O_NONBLOCK):
                path.unlink()


@contextmanager
def own_folder() -> Iterator[Path]:
    """A new folder for a Ray, which is deleted at the end, as are those of killed processes now.

    Only this user may read it: Ray opens its own folders to everyone.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/r"):
        with suppress(OSError), _locked(left.parent, os.O_RDONLY | os.O_DIRECTORY):
            shutil.rmtree(left.parent, ignore_errors=True)
    private = tempfile.TemporaryDirectory(prefix=_FOLDER, ignore_cleanup_errors=True)
    with private as folder, ExitStack() as held:
        with suppress(OSError):  # a file system without locks: nothing there is deleted later
            held.enter_context(_locked(Path(folder), os.O_RDONLY | os.O_DIRECTORY))
        yield Path(folder, "r")


@contextmanager
def _locked(path: Path, flags: int) -> Iterator[None]:
    """Holds the lock of a file or a folder of this user; OSError if another process holds it."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{path} is of another user")
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _disk_errors(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be {done}: {error.strerror}") from error


def _files(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    # — by default, os.walk skips a folder that it may not read: objects would be missed
    for place, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(place, name) for name in names)


def _link(temporary: Path, final: Path) -> bool:
    """Whether `final` now names the file; False if another file has that name."""
    try:
        os.link(temporary, final)
    except FileExistsError as error:
        if not stat.S_ISREG(final.lstat().st_mode):
            raise StorageError(
                f"{final}: is a folder or a link and not a file of this output; move it away, and "
                f"run again"
            ) from error
        # — a network disk can lose the reply to a successful link and repeat the request
        return temporary.samefile(final)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise RefusedError(
            f"{final}: this file system has no hard links ({error.strerror}); without them one "
            f"run could overwrite another's results; use ext4, xfs, apfs or NFS"
        ) from error
    finally:
        # — also if another process made the link: it may not have synced the folder yet
        _sync_folder(final.parent)
    return True


def _make_folder(folder: Path) -> None:
    """Makes a folder and its parents so that their names survive a power cut, too."""
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
