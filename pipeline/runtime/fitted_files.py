"""Files of readouts and thresholds, named in a spec by a local path or an fsspec URL.

Entry points: `find_readouts` and `load_thresholds` in the driver, `load_readouts` on a worker,
`read_fitted` for the bytes of any such file, and `fitted_copy` for a copy in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fsspec.core import split_protocol
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import Problem, SpecError, StorageError, one_line
from pipeline.fitted.cascade_file import Thresholds, parse_thresholds
from pipeline.fitted.readout import (
    Readout,
    ReadoutError,
    differences,
    parse_readout,
)
from pipeline.hashes import canonical_json, content_hash, sha256_hex, short_hash
from pipeline.local_files import check_regular
from pipeline.sources.listing import content_etag
from pipeline.sources.streams import Options
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import CascadeTask, TaskSpec
from pipeline.stores.file_systems import file_system_at
from pipeline.stores.named_files import open_target
from pipeline.stores.retries import (
    REMOTE_ERRORS,
    Cause,
    RetryPolicy,
    as_storage_error,
    cause_of,
    option_errors,
    retry,
)

# The commands that make the files, by the key of a task that names one.
_MADE_BY = {
    "readout": "assay fit",
    "cascade.file": "assay cascade",
}
Loaded = TypeVar("Loaded")


def options_for(path: str, spec: JobSpec) -> Options:
    """The storage options for the path: the output's, where both are the same kind of store."""
    same = split_protocol(path)[0] == split_protocol(spec.output)[0]
    return spec.storage_options if same else {}


def read_fitted(path: str, options: Options, *, place: str, made_by: str) -> bytes:
    """The file's content; SpecError if it is missing, StorageError if its store does not answer.

    The error names `place`, the file's place in the spec, and `made_by`, the command that makes it.
    """
    data: bytes = _ask("cat_file", path, options, place=place, made_by=made_by)
    return data


def fitted_copy(
    path: str, options: Options, *, place: str, made_by: str, cache_dir: Path, digest: str = ""
) -> Path:
    """A copy of a remote file below `cache_dir`: it is read once, and again if it changes.

    A copy with the SHA-256 `digest` is used, if there is one. Otherwise one for which the store has
    the same hash now. The errors are those of `read_fitted`.
    """
    folder = cache_dir / "fitted"

    def is_whole(copy: Path) -> bool:
        return copy.is_file() and content_hash(copy, cache_dir) == copy.name

    if digest and is_whole(copy := folder / digest):
        return copy
    etag = content_etag(_ask("info", path, options, place=place, made_by=made_by))
    known = folder / f"etag-{short_hash(canonical_json([path, dict(options), etag]))}"
    if etag and is_whole(copy := known.resolve()):
        return copy
    data = read_fitted(path, options, place=place, made_by=made_by)
    copy = folder / sha256_hex(data)
    if not is_whole(copy):
        open_target(str(copy), {}).write(data)
    with suppress(OSError):  # another process did it, or the disk has no links
        if etag:
            known.symlink_to(copy.name)
    return copy


def _ask(method: str, path: str, options: Options, *, place: str, made_by: str) -> Any:
    """What this method of the path's file system returns."""
    with option_errors(place, options):
        try:
            file_system, key = file_system_at(path, options)
        except (ValueError, ImportError) as error:  # no such protocol or package
            raise SpecError([Problem(place, f"cannot be opened: {error}", path)]) from error
        file_system.invalidate_cache()  # forgets what it listed before
    local = isinstance(file_system, LocalFileSystem)
    try:
        if local:
            check_regular(key)
        return retry(partial(getattr(file_system, method), key), RetryPolicy())
    except REMOTE_ERRORS as error:
        if not local and cause_of(error) is not Cause.MISSING:
            raise as_storage_error(error, path, "read") from error
        unknown = one_line(error) if local else "there is no such file"
        reason = getattr(error, "strerror", None) or unknown
        fix = f"the file cannot be read: {reason}; `{made_by}` makes one"
        raise SpecError([Problem(place, fix, path)]) from error


def find_readouts(
    spec: JobSpec,
    *,
    weights: Mapping[str, str],
    dtype: str,
    places: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The SHA-256 of each readout, by part of a task; SpecError for one fitted for another spec.

    `places` are those of the tasks, where the spec is a part of another.
    """
    places = places or places_of(spec)

    def find(task: TaskSpec, data: bytes) -> str:
        readout = parse_readout(data)
        where = places[_task_of(task)]
        if problems := [*differences(spec, task, where, readout, weights=weights, dtype=dtype)]:
            raise SpecError(problems)
        return sha256_hex(data)

    paths = [task.readout for task in spec.parts]
    return _of_each_file(spec, "readout", paths, find, places=places)


def load_readouts(hashes: Mapping[str, str], spec: JobSpec, cache_dir: Path) -> dict[str, Readout]:
    """The readouts by part of a task.

    StorageError if a file does not have the hash that `find_readouts` gave.
    """

    def load(task: TaskSpec, data: bytes) -> Readout:
        if sha256_hex(data) != hashes[task.name]:
            raise StorageError(
                f"{task.readout}: the readout of {task.name!r} changed while the job ran; run "
                f"again, with a file that all machines can read and that does not change"
            )
        return parse_readout(data)

    paths = [task.readout for task in spec.parts]
    return _of_each_file(spec, "readout", paths, load, cached=(cache_dir, hashes))


def load_thresholds(
    spec: JobSpec, stages: Mapping[str, Sequence[str]]
) -> dict[str, Thresholds]:  # by task
    """The thresholds of each cascade; SpecError for those chosen for other stages.

    `stages` are the fingerprints of each cascade's stages, by task.
    """

    def load(task: TaskSpec, data: bytes) -> Thresholds:
        own = parse_thresholds(data)
        if (own.task, own.labels) != (task.name, tuple(task.labels)):
            raise ValueError(f"it is for task {own.task!r} and its labels {list(own.labels)}")
        if own.stages != tuple(stages[task.name]):
            raise ValueError("it is for other stages, or for another version of these")
        return own

    paths = [task.cascade.file if isinstance(task, CascadeTask) else None for task in spec.parts]
    return _of_each_file(spec, "cascade.file", paths, load)


def _of_each_file(
    spec: JobSpec,
    key: str,
    paths: Sequence[str | None],  # by part of a task
    load: Callable[[TaskSpec, bytes], Loaded],
    *,
    cached: tuple[Path, Mapping[str, str]] | None = None,
    places: Mapping[str, str] | None = None,
) -> dict[str, Loaded]:
    """By part of a task, what `load` makes of the file that it has at this key of the spec.

    `cached` is the folder of the cache, and the SHA-256 of each file, which is then read once.
    SpecError with the problems of all tasks, among them the files that `load` refuses.
    """
    loaded, problems, made_by = {}, list[Problem](), _MADE_BY[key]
    places = places or places_of(spec)
    for task, path in zip(spec.parts, paths, strict=True):
        if path is None:
            continue
        place, options = f"{places[_task_of(task)]}.{key}", options_for(path, spec)
        if cached is not None and "://" in path:
            folder, digest = cached[0], cached[1][task.name]
            data = fitted_copy(
                path, options, place=place, made_by=made_by, cache_dir=folder, digest=digest
            ).read_bytes()
        else:
            data = read_fitted(path, options, place=place, made_by=made_by)
        try:
            loaded[task.name] = load(task, data)
        except SpecError as error:
            problems += error.problems
        except ReadoutError as error:
            problems.append(Problem(place, str(error), path))
        except ValueError as error:
            fix = f"cannot be used for task {task.name!r}: {error}; `{made_by}` makes another"
            problems.append(Problem(place, fix, path))
    if problems:
        raise SpecError(problems)
    return loaded


def places_of(spec: JobSpec) -> dict[str, str]:
    """By task, where it is in the spec."""
    return {task.name: f"tasks.{number}" for number, task in enumerate(spec.tasks)}


def _task_of(part: TaskSpec) -> str:
    """The name of the task that a part is of."""
    return part.name.partition(".")[0]
