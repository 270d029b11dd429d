"""Models that were fetched, converted or cast, in a folder that all processes of a machine share.

Entry point: `cached_model`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.errors import StorageError

# The hashes of the files of a cached model, as `sha256sum --check` reads them.
SUMS = "SHA256SUMS"
# The processes of a machine that start within this time of each other check a model once.
CHECKED_S = 3_600
# What another machine began, in a folder that both have, is left over after this time.
_ABANDONED_S = 24 * 3_600

logger = logging.getLogger(__name__)


@contextmanager
def locked(cache_dir: Path, name: str) -> Iterator[None]:
    """One process of a machine at a time: its engines start together.

    On a disk without locks, such as some of NFS and Lustre, several may do the same.
    """
    file = cache_dir / "locks" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        yield


def cached_folder(name: str, cache_dir: Path) -> Path:
    """Where the model of this name is kept, if it is."""
    return cache_dir / "models" / name


def require_room(folder: Path, needed_bytes: int) -> None:
    """StorageError unless the disk of a folder, which may not exist yet, has so much free space."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if (free := shutil.disk_usage(existing).free) < needed_bytes:
        raise StorageError(
            f"{folder}: the model needs {needed_bytes / 1e9:,.2f} GB, and {free / 1e9:,.2f} GB are "
            f"free; free some space, or name another folder in ASSAY_CACHE (HF_HOME for the Hub)"
        )


def cached_model(
    name: str,
    cache_dir: Path,
    fill: Callable[[Path], None],
    *,
    needed: Callable[[], int] = lambda: 0,
) -> Path:
    """The model's folder in the cache; `fill` writes the files of a new one, in one process.

    `needed` gives the bytes of a new one; StorageError if the disk has fewer.

    A folder whose files differ from what was written, by the hashes beside them, is named in the
    log and written again.
    """
    folder = cached_folder(name, cache_dir)
    if folder in _whole:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(cache_dir, name):
        if _is_whole(folder, cache_dir):
            return folder
        _remove_left(folder)
        require_room(folder, needed())
        written = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{_partial(folder)}-"))
        if folder.exists():
            os.replace(folder, written)  # — who has mapped its files keeps them
            shutil.rmtree(written)
            written.mkdir()
        try:
            fill(written)
            sums = "".join(f"{digest}  {name}\n" for name, digest in _written(written).items())
            (written / SUMS).write_text(sums, encoding="utf-8")
        except Exception as error:
            shutil.rmtree(written, ignore_errors=True)
            if os.strerror(errno.ENOSPC) not in str(error):  # — safetensors has it as words alone
                raise
            raise StorageError(
                f"{folder}: the model cannot be written: the disk is full; free some space, or "
                f"name another folder in ASSAY_CACHE"
            ) from error
        try:
            os.replace(written, folder)
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(written)  # — without locks, another process was faster
        _mark_checked(folder, cache_dir)
        return folder


def _partial(folder: Path) -> str:
    """How the names of this machine's unfinished folders of a model begin."""
    return f"{folder.name}.partial-{socket.gethostname()}"


def _remove_left(folder: Path) -> None:
    """Removes what killed processes left of a model; the caller holds the lock of this machine."""
    for left in folder.parent.glob(f"{folder.name}.partial-*"):
        with suppress(FileNotFoundError):
            is_old = time.time() - left.stat().st_mtime > _ABANDONED_S
            if is_old or left.name.startswith(_partial(folder)):
                shutil.rmtree(left)


_whole: set[Path] = set()  # folders that this process has checked


def _mark_checked(folder: Path, cache_dir: Path) -> None:
    """From now on, this process and those that start soon take the folder as whole."""
    (cache_dir / "locks" / f"{folder.name}.checked").touch()
    _whole.add(folder)


def _is_whole(folder: Path, cache_dir: Path) -> bool:
    """Whether the files are those that were written. One process of a machine reads them for this.

    The caller holds the lock.
    """
    if not folder.exists():
        return False
    with suppress(FileNotFoundError):
        checked = (cache_dir / "locks" / f"{folder.name}.checked").stat().st_mtime
        if time.time() - checked < CHECKED_S:
            _whole.add(folder)
            return True
    try:
        recorded, present = parse_sums((folder / SUMS).read_bytes()), _written(folder)
    except OSError as error:
        logger.warning("%s: the model is made again: %s", folder, error)
        return False
    if recorded != present:
        names = differing(recorded, present)
        logger.warning("%s: %s is not what was written; the model is made again", folder, names)
        return False
    _mark_checked(folder, cache_dir)
    return True


def parse_sums(data: bytes) -> dict[str, str]:
    """The hashes by name in a file that `sha256sum` or this module wrote."""
    return {line[66:]: line[:64] for line in data.decode(errors="replace").splitlines()}


def _written(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of the folder but the file of hashes itself, in order."""
    hashes = {}
    for file in sorted(folder.iterdir()):
        if file.name != SUMS:
            with file.open("rb") as stream:
                hashes[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The names of the files whose hashes differ."""
    return ", ".join(sorted({name for name, _ in one.items() ^ other.items()}))
