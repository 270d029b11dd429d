"""Files of readouts, calibrations and thresholds, named in a spec by a local path or an fsspec URL.

Entry points: `find_readouts`, `load_calibrations` and `load_thresholds` in the driver,
`load_readouts` on a worker, and `read_fitted` and `write_fitted` for the bytes of any such file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from fsspec.core import split_protocol
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import Problem, SpecError, StorageError
from pipeline.fitted.calibration import CalibrationFile, parse_calibration
from pipeline.fitted.cascade_file import Thresholds, parse_thresholds
from pipeline.fitted.readout import (
    Readout,
    ReadoutError,
    differences,
    parse_readout,
)
from pipeline.hashes import sha256_hex
from pipeline.sources.streams import Options
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.schema import JobSpec
from pipeline.stores.file_systems import file_system_at
from pipeline.stores.named_files import open_target
from pipeline.stores.retries import (
    REMOTE_ERRORS,
    Cause,
    as_storage_error,
    cause_of,
    option_errors,
)

logger = logging.getLogger(__name__)


def options_for(path: str, spec: JobSpec) -> Options:
    """The storage options for the path: the output's, where both are the same kind of store."""
    same = split_protocol(path)[0] == split_protocol(spec.output)[0]
    return spec.storage_options if same else {}


def read_fitted(path: str, options: Options, *, place: str, made_by: str) -> bytes:
    """The file's content; SpecError if it is missing, StorageError if its store does not answer.

    The error names `place`, the file's place in the spec, and `made_by`, the command that makes it.
    """
    with option_errors(place, options):
        file_system, key = file_system_at(path, options)
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
    """Writes the whole file or nothing; replaces an older one."""
    with open_target(path, options, flag="--to").replaced() as file:
        file.write_bytes(data)


def find_readouts(
    spec: JobSpec,
    *,
    weights: Mapping[str, str],
    dtype: str,
    is_same_model: Callable[[Mapping[str, str]], bool] = lambda _: False,
) -> dict[str, str]:
    """The SHA-256 of each task's readout, by task; SpecError for those fitted for another spec.

    `is_same_model` says whether another identity than `weights` is of the same model.
    """
    problems: list[Problem] = []
    hashes: dict[str, str] = {}
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
        fitted = readout.card.model.weights
        own = fitted if fitted != weights and is_same_model(fitted) else weights
        problems += differences(spec, task, where, readout, weights=own, dtype=dtype)
        hashes[task.name] = sha256_hex(data)
    if problems:
        raise SpecError(problems)
    return hashes


def load_readouts(hashes: Mapping[str, str], spec: JobSpec) -> dict[str, Readout]:  # by task
    """The readouts, each of the layer that the spec reads.

    StorageError if a file does not have the hash that `find_readouts` gave.
    """
    loaded = {}
    for task in spec.tasks:
        if task.readout is None:
            continue
        data = _read(task.readout, spec, f"readout of {task.name}")
        if sha256_hex(data) != hashes[task.name]:
            raise StorageError(
                f"{task.readout}: the readout of {task.name!r} changed while the job ran; run "
                f"again, with a file that all machines can read and that does not change"
            )
        readout = parse_readout(data)
        loaded[task.name] = readout if spec.exit is None else readout.at(spec.exit.layer)
    return loaded


def load_calibrations(spec: JobSpec) -> dict[str, CalibrationFile]:
    """The calibration files that the tasks name; SpecError for files of other tasks."""
    files: dict[str, CalibrationFile] = {}
    problems: list[Problem] = []
    for index, task in enumerate(spec.tasks):
        if task.calibration is None:
            continue
        path, place = task.calibration.file, f"tasks.{index}.calibration.file"
        data = read_fitted(path, options_for(path, spec), place=place, made_by="assay calibrate")
        try:
            files[task.name] = parse_calibration(data)
            own = files[task.name].calibration
            if own.method != task.calibration.method:
                raise ValueError(f"it is of method {own.method!r}, not {task.calibration.method!r}")
            if own.labels != tuple(task.labels):
                raise ValueError(
                    f"it is for the labels {list(own.labels)}, in this order, and the task has "
                    f"{list(task.labels)}"
                )
        except ValueError as error:
            fix = f"cannot calibrate task {task.name!r}: {error}; `assay calibrate` makes another"
            problems.append(Problem(place, fix, path))
    if problems:
        raise SpecError(problems)
    return files


def warn_of_stale_calibrations(
    files: Mapping[str, CalibrationFile], fingerprints: Mapping[str, Fingerprint]
) -> None:
    """Logs the calibrations that were fitted to other answers than those they are applied to."""
    for task, file in files.items():
        raw = fingerprints[task].raw.id
        if file.fingerprint != raw:
            logger.warning(
                "task %s: its calibration was fitted to the answers of fingerprint %s; the current "
                "fingerprint is %s; `assay calibrate` fits a new one",
                task,
                file.fingerprint,
                raw,
            )


def load_thresholds(
    spec: JobSpec, stages: Mapping[str, Sequence[str]]
) -> dict[str, Thresholds]:  # by task
    """The thresholds of each cascade; SpecError for those chosen for other stages.

    `stages` are the fingerprints of each cascade's stages, by task.
    """
    loaded, problems = {}, []
    for index, task in enumerate(spec.tasks):
        if task.cascade is None:
            continue
        path, place = task.cascade.file, f"tasks.{index}.cascade.file"
        data = read_fitted(path, options_for(path, spec), place=place, made_by="assay cascade")
        try:
            own = parse_thresholds(data)
            if (own.task, own.labels) != (task.name, tuple(task.labels)):
                raise ValueError(f"they are of task {own.task!r} and its labels {list(own.labels)}")
            if own.stages != tuple(stages[task.name]):
                raise ValueError("they are of other stages, or of another version of these")
            loaded[task.name] = own
        except ValueError as error:
            fix = f"no thresholds for task {task.name!r}: {error}; `assay cascade` chooses them"
            problems.append(Problem(place, fix, path))
    if problems:
        raise SpecError(problems)
    return loaded


def _read(path: str, spec: JobSpec, place: str) -> bytes:
    return read_fitted(path, options_for(path, spec), place=place, made_by="assay fit")
