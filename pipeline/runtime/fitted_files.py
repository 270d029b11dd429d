"""Files that tasks name by a local path or an fsspec URL: readouts, thresholds, classifiers.

Entry points: `find_readouts` and `find_classifiers` in the driver, which reads or hashes them;
`load_readouts` and `read_classifier` on a worker; and `read_fitted` for the bytes of a readout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from fsspec.core import split_protocol
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import ModelError, Problem, SpecError, StorageError, one_line, option_error
from pipeline.fitted.readout import Readout, ReadoutError, differences, parse_readout
from pipeline.hashes import canonical_json, content_hash, sha256_hex, short_hash
from pipeline.inference.classifiers import Classifier, language_model, load_classifier
from pipeline.ledger.cells import stored_version
from pipeline.ledger.snapshots import headers
from pipeline.local_files import check_regular
from pipeline.sources.listing import content_etag
from pipeline.sources.streams import Options
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.file_systems import file_system_at
from pipeline.stores.named_files import open_target
from pipeline.stores.retries import (
    Cause,
    as_storage_error,
    cause_of,
    option_errors,
    remote_errors,
    retry,
)
from pipeline.stores.store import open_store

# What makes the files, by the key of a task that names one.
_MADE_BY = {"readout": "assay fit", "classifier.path": "fasttext or skl2onnx"}
_NONE: Mapping[str, str] = MappingProxyType({})
Loaded = TypeVar("Loaded")


def options_for(path: str, spec: JobSpec) -> Options:
    """The storage options for the path: the output's, where both are the same kind of store."""
    same = split_protocol(path)[0] == split_protocol(spec.output)[0]
    return spec.storage_options if same else {}


def refuse_published(spec: JobSpec, paths: Sequence[str]) -> None:
    """SpecError if one of the readouts gave the answers of the spec's last snapshot.

    Its hash is in their fingerprint, so without it the corpus cannot grow.
    """
    store = open_store(spec.output, spec.storage_options)
    last = next(headers(store, spec.name), None)
    tasks = {} if last is None else last["tasks"]
    versions = [stored_version(store, name, of["fp"]).json() for name, of in tasks.items()]
    for path in paths:
        target = open_target(path, options_for(path, spec))
        if last is None or not target.exists():
            continue
        digest = sha256_hex(target.read()).encode()
        if any(digest in version for version in versions):
            fix = f"missing; snapshot {last['number']:08d} has answers of the readout {path}, and "
            fix += "is to grow with it; write another path"
            raise option_error("to", fix)


def read_fitted(path: str, options: Options, *, place: str) -> bytes:
    """A readout's content; SpecError if it is missing, StorageError if its store does not answer.

    The error names `place`, the file's place in the spec.
    """
    data: bytes = _ask("cat_file", path, options, place=place, made_by=_MADE_BY["readout"])
    return data


def _file_of(
    spec: JobSpec, task: TaskSpec, key: str, place: str, cache_dir: Path, digest: str
) -> Path | None:
    """The file that a task names at this key, on this machine; None if it names none.

    Of a remote file it is a copy below `cache_dir`, which is read once: one with the SHA-256
    `digest`, if there is one; otherwise one for which the store has the same hash now. The errors
    are those of `read_fitted`, and StorageError for a file with another hash than `digest`.
    """
    if (path := _path_of(task, key)) is None:
        return None
    file = Path(os.path.expanduser(path))
    ask = partial(
        _ask, path=path, options=options_for(path, spec), place=place, made_by=_MADE_BY[key]
    )
    if "://" in path:
        file = _copy_of(path, ask, cache_dir / "fitted", digest)
    else:
        ask("open").close()
    if digest and content_hash(file, cache_dir) != digest:
        raise StorageError(
            f"{path}: the file of {task.name!r} changed while the job ran; run again, with a file "
            f"that all machines can read and that does not change"
        )
    return file


def _copy_of(path: str, ask: Callable[[str], Any], folder: Path, digest: str) -> Path:
    """A copy of a remote file in the folder; `ask` is `_ask` of the file."""

    def is_whole(copy: Path) -> bool:
        return copy.is_file() and content_hash(copy, folder.parent) == copy.name

    if digest and is_whole(copy := folder / digest):
        return copy
    etag = content_etag(ask("info"))
    known = folder / f"etag-{short_hash(canonical_json([path, etag]))}"
    if etag and is_whole(copy := known.resolve()):
        return copy
    data = ask("cat_file")
    copy = folder / sha256_hex(data)
    if not is_whole(copy):
        open_target(str(copy), {}).write(data)
    with suppress(OSError):  # another process did it, or the disk has no links
        if etag:
            known.symlink_to(copy.name)
    return copy


def _path_of(task: TaskSpec, key: str) -> str | None:
    """The path that the task has at this key; of a model that a package carries, its file."""
    if key == "readout":
        return task.readout
    if task.classifier is not None and task.classifier.kind == "language":
        return str(language_model()[0])
    return None if task.classifier is None else task.classifier.path


def _ask(method: str, path: str, options: Options, *, place: str, made_by: str) -> Any:
    """What this method of the path's file system returns."""
    with option_errors(place, options):
        try:
            file_system, key = file_system_at(path, options)
        except (ValueError, ImportError) as error:  # no such protocol or package
            raise SpecError([Problem(place, f"cannot be opened: {error}", path)]) from error
        file_system.invalidate_cache()  # of earlier listings
    local = isinstance(file_system, LocalFileSystem)
    try:
        if local:
            check_regular(key)
        return retry(partial(getattr(file_system, method), key))
    except remote_errors() as error:
        if not local and cause_of(error) is not Cause.MISSING:
            raise as_storage_error(error, path, "read") from error
        unknown = one_line(error) if local else "there is no such file"
        reason = getattr(error, "strerror", None) or unknown
        fix = f"the file cannot be read: {reason}; `{made_by}` makes one"
        raise SpecError([Problem(place, fix, path)]) from error


def find_readouts(
    spec: JobSpec,
    cache_dir: Path,
    *,
    weights: Mapping[str, str],
    dtype: str,
    places: Mapping[str, str] = _NONE,
) -> dict[str, str]:
    """The SHA-256 of each readout, by part of a task; SpecError for one fitted for another spec.

    `places` are those of the tasks, where the spec is a part of another.
    """

    def find(task: TaskSpec, place: str, file: Path) -> str:
        readout = parse_readout(file.read_bytes())
        if problems := [*differences(spec, task, place, readout, weights=weights, dtype=dtype)]:
            raise SpecError(problems)
        return content_hash(file, cache_dir)

    return _of_each_file(spec, "readout", find, cache_dir, places=places)


def load_readouts(
    hashes: Mapping[str, str], spec: JobSpec, cache_dir: Path, *, places: Mapping[str, str] = _NONE
) -> dict[str, Readout]:
    """The readouts by part of a task; `places` as for `find_readouts`.

    StorageError if a file does not have the hash that `find_readouts` gave.
    """
    return _of_each_file(
        spec,
        "readout",
        lambda _task, _place, file: parse_readout(file.read_bytes()),
        cache_dir,
        hashes=hashes,
        places=places,
    )


def find_classifiers(
    spec: JobSpec, cache_dir: Path, *, places: Mapping[str, str] = _NONE
) -> dict[str, str]:
    """The SHA-256 of each task's classifier, by task; SpecError for files that are missing.

    For a model that a package carries, the package's version follows. `places` are those of the
    tasks, where the spec is a part of another.
    """

    def find(task: TaskSpec, _place: str, file: Path) -> str:
        assert task.classifier is not None, task.name
        is_carried = task.classifier.kind == "language"
        return content_hash(file, cache_dir) + (f" {language_model()[1]}" if is_carried else "")

    return _of_each_file(spec, "classifier.path", find, cache_dir, places=places)


def read_classifier(
    spec: JobSpec, task: TaskSpec, cache_dir: Path, digest: str, place: str
) -> Classifier:
    """The classifier of a task at this place of the spec; ModelError if it cannot be used.

    StorageError if the file does not have the hash that `find_classifiers` gave.
    """
    key = "classifier.path"
    file = _file_of(spec, task, key, f"{place}.{key}", cache_dir, digest.partition(" ")[0])
    assert task.classifier is not None and file is not None, task.name
    return load_classifier(task.classifier.kind, file)


def _of_each_file(
    spec: JobSpec,
    key: str,
    load: Callable[[TaskSpec, str, Path], Loaded],
    cache_dir: Path,
    *,
    hashes: Mapping[str, str] = _NONE,
    places: Mapping[str, str] = _NONE,
) -> dict[str, Loaded]:
    """By part of a task, what `load` makes of the file that it has at this key of the spec.

    `load` gets the part, the place of its task in the spec, and the file on this machine.
    `hashes` are those that the files must have, where they are known. SpecError with the problems
    of all tasks, among them the files that `load` refuses.
    """
    loaded, problems = {}, list[Problem]()
    of_task = {task.name: f"tasks.{number}" for number, task in enumerate(spec.tasks)} | {**places}
    for task in spec.parts:
        # — a fit has the parts of a task as its tasks
        place = of_task.get(task.name) or of_task[task.name.partition(".")[0]]
        try:
            digest = hashes.get(task.name, "")
            file = _file_of(spec, task, key, f"{place}.{key}", cache_dir, digest)
            if file is not None:
                loaded[task.name] = load(task, place, file)
        except SpecError as error:
            problems += error.problems
        except ModelError as error:  # the package that carries the file is not installed
            problems.append(Problem(f"{place}.classifier.kind", str(error)))
        except (ReadoutError, ValueError) as error:
            fix = f"{error}; `{_MADE_BY[key]}` makes another"
            problems.append(Problem(f"{place}.{key}", fix, _path_of(task, key)))
    if problems:
        raise SpecError(problems)
    return loaded
