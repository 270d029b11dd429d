"""Calibration files: one JSON value a file, at any fsspec path, or in the output.

Entry points: `load_calibrations` for files that the spec names, `stored_calibrations` for
contextual ones, `write_calibration`. `fitted.calibration` applies a calibration.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Problem, SpecError, StorageError
from pipeline.fitted.calibration import Calibration, calibration_from_json
from pipeline.hashes import canonical_json, short_hash
from pipeline.ledger.keys import SPECS, calibration_key, parse_key, spec_key
from pipeline.runtime.fitted_files import options_for, read_fitted, write_fitted
from pipeline.sources.streams import Options
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.schema import FittedSpec, JobSpec
from pipeline.stores.store import Store

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True, slots=True)
class CalibrationFile:
    """A calibration and its origin."""

    task: str
    calibration: Calibration
    fingerprint: str  # of the raw answers that it was fitted to
    # {"snapshot": number}, with {"gold": its SHA-256} for a gold set; contextual: {"documents": []}
    source: Mapping[str, Any]
    rows: int

    def json(self) -> bytes:
        """The file's content: the same bytes for the same values."""
        content = {
            "format": FORMAT,
            "task": self.task,
            **self.calibration.to_json(),
            "fingerprint": self.fingerprint,
            "source": dict(self.source),
            "rows": self.rows,
        }
        return canonical_json(content) + b"\n"


def write_calibration(path: str, file: CalibrationFile, options: Options) -> None:
    """Writes the file; replaces an older one."""
    write_fitted(path, file.json(), options)


def read_calibration(path: str, options: Options, *, place: str) -> CalibrationFile:
    """The file at the path; ValueError, KeyError or TypeError if it is not a calibration file.

    SpecError for a missing file: `place` is where the spec names it.
    """
    return parse_calibration(read_fitted(path, options, place=place, made_by="assay calibrate"))


def parse_calibration(data: bytes) -> CalibrationFile:
    """The file that `CalibrationFile.json` wrote; ValueError, KeyError or TypeError otherwise."""
    content = json.loads(data)
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']!r}, and {FORMAT} is read")
    return CalibrationFile(
        task=str(content["task"]),
        calibration=calibration_from_json(content),
        fingerprint=str(content["fingerprint"]),
        source=dict(content["source"]),
        rows=int(content["rows"]),
    )


def stored_calibrations(
    store: Store,
    fingerprints: Mapping[str, Fingerprint],
    measure: Callable[[Sequence[str]], Mapping[str, CalibrationFile]],
) -> dict[str, CalibrationFile]:
    """The contextual calibrations of these tasks, which the output keeps.

    `measure` makes those that are missing. The first writer's file is the one that every run uses,
    so that several drivers of one spec give the same values.
    """
    keys = {task: calibration_key(task, version.id) for task, version in fingerprints.items()}
    missing = [task for task, key in keys.items() if not any(store.list(key))]
    if missing:
        for task, file in measure(missing).items():
            store.create(keys[task], file.json())
    return {task: _stored(store, key) for task, key in keys.items()}


def _stored(store: Store, key: str) -> CalibrationFile:
    try:
        return parse_calibration(store.read(key))
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{store.url}/{key}: is not a calibration file: {error}; delete it to have it measured "
            f"again"
        ) from error


def load_calibrations(spec: JobSpec) -> dict[str, CalibrationFile]:
    """The calibration files that the tasks name; SpecError for files of other tasks."""
    files: dict[str, CalibrationFile] = {}
    problems: list[Problem] = []
    for index, task in enumerate(spec.tasks):
        if not isinstance(task.calibration, FittedSpec):
            continue
        path, place = task.calibration.file, f"tasks.{index}.calibration.file"
        try:
            file = read_calibration(path, options_for(path, spec), place=place)
            _check(file, task.calibration.method, tuple(task.labels))
            files[task.name] = file
        except (ValueError, KeyError, TypeError) as error:
            what = f"missing {error}" if isinstance(error, KeyError) else str(error)
            fix = f"cannot calibrate task {task.name!r}: {what}; `assay calibrate` makes another"
            problems.append(Problem(place, fix, path))
    if problems:
        raise SpecError(problems)
    return files


def calibration_hash(file: CalibrationFile) -> str:
    """The hash of the calibration alone; its origin does not enter."""
    return short_hash(canonical_json(file.calibration.to_json()))


def versions_with_equal_raw_answers(
    store: Store, versions: Mapping[str, Fingerprint]
) -> dict[str, list[str]]:
    """By task, the other fingerprints in the output with the same raw answers."""
    return {task: list(_same_answers(store, task, of)) for task, of in versions.items()}


def raw_fingerprint(store: Store, task: str, fp: str) -> str:
    """The fingerprint of the same answers without calibration, from the stored content."""
    return Fingerprint(_words(store, spec_key(task, fp))).raw.id


def _same_answers(store: Store, task: str, version: Fingerprint) -> Iterator[str]:
    own, raw = version.id, version.raw.id
    for stored in store.list(f"{SPECS}{task}/"):
        key = parse_key(stored.key)
        if not key or key.fp == own or stored.key != spec_key(task, key.fp):
            continue
        if raw_fingerprint(store, task, key.fp) == raw:
            yield key.fp


def _words(store: Store, key: str) -> dict[str, Any]:
    """The content of a fingerprint; empty for a damaged file."""
    try:
        words = json.loads(store.read(key))
    except ValueError:
        words = None
    return words if isinstance(words, dict) else {}


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


def _check(file: CalibrationFile, method: str, labels: tuple[str, ...]) -> None:
    if file.calibration.method != method:
        raise ValueError(f"it is of method {file.calibration.method!r}, not {method!r}")
    if file.calibration.labels != labels:
        raise ValueError(
            f"it is for the labels {list(file.calibration.labels)}, in this order, and the task "
            f"has {list(labels)}"
        )
