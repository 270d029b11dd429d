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
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import StorageError

# The hashes of the files of a cached model, as `sha256sum --check` reads them.
SUMS = "SHA256SUMS"

logger = logging.getLogger(__name__)


@contextmanager
def locked(cache_dir: Path, name: str) -> Iterator[None]:
    """One process of a machine at a time: its engines start together."""
    file = cache_dir / "locks" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
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
    if _is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(cache_dir, name):
        if _is_whole(folder):
            return folder
        beginning = f"{name}.partial-"
        for left in folder.parent.glob(f"{beginning}*"):  # by a process that was killed
            shutil.rmtree(left)
        require_room(folder, needed())
        written = Path(tempfile.mkdtemp(dir=folder.parent, prefix=beginning))
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
        os.replace(written, folder)
        _whole.add(folder)
        return folder


_whole: set[Path] = set()  # folders that this process has checked


def _is_whole(folder: Path) -> bool:
    """Whether the files are those that were written. Each process reads them once for this."""
    if folder in _whole or not folder.exists():
        return folder in _whole
    try:
        recorded, present = parse_sums((folder / SUMS).read_bytes()), _written(folder)
    except OSError as error:
        logger.warning("%s: the model is made again: %s", folder, error)
        return False
    if recorded != present:
        names = differing(recorded, present)
        logger.warning("%s: %s is not what was written; the model is made again", folder, names)
        return False
    _whole.add(folder)
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
