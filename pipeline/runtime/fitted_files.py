"""Small files that a spec names, readouts and calibrations: read and written whole, at any path.

Knows local paths and fsspec URLs, and bytes. Knows nothing of what is in a file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsspec.core import split_protocol, url_to_fs
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import Problem, SpecError, StorageError
from pipeline.fitted.readout import (
    Readout,
    ReadoutError,
    content_id,
    differences,
    missing_layers,
    parse_readout,
    pointless_layers,
    unmeasurable,
)
from pipeline.sources.streams import Options
from pipeline.spec.schema import JobSpec
from pipeline.stores.errors import (
    REMOTE_ERRORS,
    Cause,
    as_storage_error,
    cause_of,
    option_errors,
    storage_errors,
)


def options_for(path: str, spec: JobSpec) -> Options:
    """What opens the path: the output's options, where it is the same kind of store."""
    same = split_protocol(path)[0] == split_protocol(spec.output)[0]
    return spec.storage_options if same else {}


def read_fitted(path: str, options: Options, *, place: str, made_by: str) -> bytes:
    """The file's content.

    `place` is where the spec names it and `made_by` the command that makes one: both for the
    SpecError of a file that is not there. StorageError where its store does not answer.
    """
    with option_errors(place, options):
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
    with option_errors("--to", options):
        file_system, key = url_to_fs(path, **options)
    with storage_errors(path, "written"):
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


@dataclass(frozen=True, slots=True)
class ReadoutRef:
    """A readout that was found: where a worker gets it, and what identifies its content."""

    path: str
    sha256: str


def find_readouts(
    spec: JobSpec, *, weights: Mapping[str, str], dtype: str
) -> dict[str, ReadoutRef]:
    """The readouts that the tasks name, by task; SpecError for those that fit other answers."""
    problems: list[Problem] = []
    found: dict[str, ReadoutRef] = {}
    readouts: dict[str, Readout] = {}
    for place, task in enumerate(spec.tasks):
        if task.readout is None:
            continue
        where = f"tasks.{place}"
        try:
            data = _read(task.readout, spec, f"{where}.readout")
            readout = parse_readout(data)
        except ReadoutError as error:
            problems.append(Problem(f"{where}.readout", str(error), task.readout))
            continue
        readouts[task.name] = readout
        problems += differences(spec, task, where, readout.card, weights=weights, dtype=dtype)
        problems += missing_layers(spec, task, readout)
        problems += unmeasurable(task, where, readout.card)
        found[task.name] = ReadoutRef(task.readout, content_id(data))
    problems += pointless_layers(spec, readouts)
    if problems:
        raise SpecError(problems)
    return found


def load_readouts(refs: Mapping[str, ReadoutRef], spec: JobSpec) -> dict[str, Readout]:  # by task
    """The readouts themselves; StorageError if a file is no longer the one that was found."""
    loaded = {}
    for name, ref in refs.items():
        data = _read(ref.path, spec, f"readout of {name}")
        if content_id(data) != ref.sha256:
            raise StorageError(
                f"{ref.path}: the readout of {name!r} is another than when the run began; run "
                f"again when it is still, from a path that all machines see"
            )
        loaded[name] = parse_readout(data)
    return loaded


def _read(path: str, spec: JobSpec, place: str) -> bytes:
    return read_fitted(path, options_for(path, spec), place=place, made_by="assay fit")
