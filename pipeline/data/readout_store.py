"""Trained readouts written where a spec will name them: a local path, or any fsspec URL.

Knows paths and bytes. Knows nothing of what is in the file.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fsspec.core import url_to_fs

from pipeline.data.failures import explained, options_of
from pipeline.data.streams import Options
from pipeline.errors import StorageError

SUFFIX = ".safetensors"


def readout_path(task: str, *, named: str | None, to: str | None, tasks: int) -> str | None:
    """Where a task's readout goes: `to`, else where the spec names it, else below `readouts/`.

    None where `to` is one file and there are several tasks to write to it.
    """
    if to is None:
        return named or f"readouts/{task}{SUFFIX}"
    if to.endswith(SUFFIX):
        return to if tasks == 1 else None
    return f"{to.rstrip('/')}/{task}{SUFFIX}"


def write_readout(path: str, data: bytes, options: Options) -> None:
    """The file, whole or not at all; one that is there is replaced."""
    if "://" in path:
        with options_of("--to", options):
            file_system, key = url_to_fs(path, **options)
        with explained(path, "written"):
            file_system.pipe_file(key, data)
        return
    place = Path(path).expanduser()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(partial, 0o644)  # the workers of a cluster may be other users
        os.replace(partial, place)
    except OSError as error:
        raise StorageError(f"{path}: the readout cannot be written: {error.strerror}") from error
