"""Models that were fetched, converted or cast, in a folder that all processes of a machine share.

Entry point: `cached_model`.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from pipeline.errors import StorageError
from pipeline.hashes import content_hashes

# The hashes of the files of a cached model, as `sha256sum --check` reads them; written last.
SUMS = "SHA256SUMS"
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

    `needed` gives the bytes of a new one; StorageError if the disk has fewer. A folder whose files
    differ from what was written, by the hashes beside them, is named in the log and made again.
    """
    folder = cached_folder(name, cache_dir)
    with locked(cache_dir, name):
        if _is_whole(folder, cache_dir):
            return folder
        for left in (folder, *filter(_is_left, folder.parent.glob(f"{name}.partial-*"))):
            shutil.rmtree(left, ignore_errors=True)  # — processes that mapped its files keep them
        require_room(folder, needed())
        written = folder.with_name(f"{name}.partial-{socket.gethostname()}-{os.getpid()}")
        written.mkdir(parents=True)
        try:
            fill(written)
            sums = [f"{digest}  {file}\n" for file, digest in _hashes(written, cache_dir).items()]
            (written / SUMS).write_text("".join(sums), encoding="utf-8")
        except Exception as error:
            shutil.rmtree(written, ignore_errors=True)
            if os.strerror(errno.ENOSPC) not in str(error):  # — safetensors has it only as text
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
        return folder


def _is_left(partial: Path) -> bool:
    """Whether no process writes an unfinished folder any more, by the machine and process in its
    name.

    Without locks, other processes of this machine may be writing.
    """
    machine, _, process = partial.name.partition(".partial-")[2].rpartition("-")
    if machine == socket.gethostname() and process.isdigit():
        return not psutil.pid_exists(int(process)) or int(process) == os.getpid()
    return partial.exists() and time.time() - partial.stat().st_mtime > _ABANDONED_S


def _is_whole(folder: Path, cache_dir: Path) -> bool:
    """Whether the files are those that were written; each is read once on a machine for this."""
    if not folder.exists():
        return False
    sums = folder / SUMS
    recorded = parse_sums(sums.read_bytes()) if sums.is_file() else {SUMS: "missing"}
    if recorded == (present := _hashes(folder, cache_dir)):
        return True
    names = differing(recorded, present)
    logger.warning("%s: %s is not what was written; the model is made again", folder, names)
    return False


def _hashes(folder: Path, cache_dir: Path) -> dict[str, str]:
    """The SHA-256 of each file of a cached model, without the file of hashes itself, in order."""
    files = sorted(file for file in folder.iterdir() if file.name != SUMS)
    names = [file.name for file in files]
    return dict(zip(names, content_hashes(files, cache_dir), strict=True))


def parse_sums(data: bytes) -> dict[str, str]:
    """The hashes by name in a file that `sha256sum` or this module wrote."""
    return {line[66:]: line[:64] for line in data.decode(errors="replace").splitlines()}


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The names of the files whose hashes differ."""
    return ", ".join(sorted({name for name, _ in one.items() ^ other.items()}))
