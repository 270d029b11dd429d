"""Small files that a spec names, readouts and calibrations: read and written whole, at any path.

Knows local paths and fsspec URLs, and bytes. Knows nothing of what is in a file.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fsspec.core import split_protocol, url_to_fs
from fsspec.implementations.local import LocalFileSystem

from pipeline.data.failures import (
    REMOTE_ERRORS,
    Cause,
    as_storage_error,
    cause_of,
    explained,
    options_of,
)
from pipeline.data.streams import Options
from pipeline.errors import Problem, SpecError
from pipeline.spec import JobSpec


def options_for(path: str, spec: JobSpec) -> Options:
    """What opens the path: the output's options, where it is the same kind of store."""
    same = split_protocol(path)[0] == split_protocol(spec.output)[0]
    return spec.storage_options if same else {}


def read_fitted(path: str, options: Options, *, place: str, made_by: str) -> bytes:
    """The file's content.

    `place` is where the spec names it and `made_by` the command that makes one: both for the
    SpecError of a file that is not there. StorageError where its store does not answer.
    """
    with options_of(place, options):
        file_system, key = url_to_fs(path, **options)
    try:
        data: bytes = file_system.cat_file(key)
    except REMOTE_ERRORS as error:
        local = isinstance(file_system, LocalFileSystem)
        if not local and cause_of(error) is not Cause.MISSING:
            raise as_storage_error(error, path, "read") from error
        reason = getattr(error, "strerror", None) or "there is no such file"
        fix = f"the file cannot be read: {reason}; `{made_by}` makes one"
        raise SpecError([Problem(place, fix, path)]) from error
    return data


def write_fitted(path: str, data: bytes, options: Options) -> None:
    """The file, whole or not at all; one that is there is replaced."""
    with options_of("--to", options):
        file_system, key = url_to_fs(path, **options)
    with explained(path, "written"):
        if isinstance(file_system, LocalFileSystem):
            _replace(Path(key), data)
        else:
            file_system.pipe_file(key, data)


def _replace(place: Path, data: bytes) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(partial, 0o644)  # the workers of a cluster may be other users
        os.replace(partial, place)
    except OSError:
        os.unlink(partial)
        raise
