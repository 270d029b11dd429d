"""Calibration files: one JSON value a file, at any fsspec path, or in the output.

Entry points: `load_calibrations` for files that the spec names, `stored_calibrations` for
contextual ones. `fitted.calibration` applies a calibration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.errors import Problem, SpecError, StorageError
from pipeline.fitted.calibration import Calibration, calibration_from_json
from pipeline.hashes import canonical_json, parse_json, short_hash
from pipeline.ledger.keys import SPECS, calibration_key, parse_key, spec_key
from pipeline.runtime.fitted_files import options_for, read_fitted
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import FittedSpec
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
        own = {"format": FORMAT, **asdict(self), **self.calibration.to_json()}
        del own["calibration"]
        return canonical_json(own) + b"\n"


def parse_calibration(data: bytes) -> CalibrationFile:
    """The file that `CalibrationFile.json` wrote; ValueError, KeyError or TypeError otherwise."""
    content = parse_json(data)
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
    stored = {}
    for task, key in keys.items():
        try:
            stored[task] = parse_calibration(store.read(key))
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{store.url}/{key}: is not a calibration file: {error}; delete it to have it "
                f"measured again"
            ) from error
    return stored


def load_calibrations(spec: JobSpec) -> dict[str, CalibrationFile]:
    """The calibration files that the tasks name; SpecError for files of other tasks."""
    files: dict[str, CalibrationFile] = {}
    problems: list[Problem] = []
    for index, task in enumerate(spec.tasks):
        if not isinstance(task.calibration, FittedSpec):
            continue
        path, place = task.calibration.file, f"tasks.{index}.calibration.file"
        try:
            data = read_fitted(
                path, options_for(path, spec), place=place, made_by="assay calibrate"
            )
            files[task.name] = parse_calibration(data)
            own = files[task.name].calibration
            if own.method != task.calibration.method:
                raise ValueError(f"it is of method {own.method!r}, not {task.calibration.method!r}")
            if own.labels != tuple(task.labels):
                raise ValueError(
                    f"it is for the labels {list(own.labels)}, in this order, and the task has "
                    f"{list(task.labels)}"
                )
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
    return {
        task: [
            fp
            for fp in stored_fps(store, task)
            if fp != version.id and raw_fingerprint(store, task, fp) == version.raw.id
        ]
        for task, version in versions.items()
    }


def stored_fps(store: Store, task: str) -> list[str]:
    """The fingerprints of the task whose content the output has."""
    keys = [(stored.key, parse_key(stored.key)) for stored in store.list(f"{SPECS}{task}/")]
    return [own.fp for key, own in keys if own and key == spec_key(task, own.fp)]


def stored_version(store: Store, task: str, fp: str) -> Fingerprint:
    """The content of a fingerprint, as the output has it; a damaged file counts as empty."""
    try:
        content = parse_json(store.read(spec_key(task, fp)))
    except ValueError:
        content = None
    return Fingerprint(content if isinstance(content, dict) else {})


def raw_fingerprint(store: Store, task: str, fp: str) -> str:
    """The fingerprint of the same answers without calibration, from the stored content."""
    return stored_version(store, task, fp).raw.id


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
