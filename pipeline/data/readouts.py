"""Where the tasks' trained readouts lie: found and compared in the driver, read on a worker.

Knows paths, any fsspec URL, and what a file is called by its content. Knows nothing of hidden
states. The file itself does not travel with the job: a worker reads it, and checks that it is
the one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.data.fitted_files import options_for, read_fitted
from pipeline.errors import Problem, SpecError, StorageError
from pipeline.readout_file import (
    Readout,
    ReadoutError,
    content_id,
    differences,
    missing_layers,
    parse_readout,
    pointless_layers,
    unmeasurable,
)
from pipeline.spec import JobSpec


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
