"""The texts that a task's answers were fitted to, which do not show how good they are.

Entry points: `FittedTexts.of`, `readout_texts`, and `is_held_out` for the texts that a fit leaves
out. A text is known by its content hash: so rows of another gold set, or of another output, count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Problem, SpecError
from pipeline.fitted.cascade_file import parse_thresholds
from pipeline.fitted.readout import ReadoutError, parse_readout
from pipeline.hashes import sha256_hex
from pipeline.ledger.columns import RAW
from pipeline.runtime.fitted_files import load_calibrations, options_for, read_fitted
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec

# If texts were left out, at least this many others make a figure.
LEAST_ROWS = 30
_SALT = "hold out "  # so that the share is independent of other choices by content hash
_HEX = 8


@dataclass(frozen=True, slots=True)
class FittedTexts:
    """The content hashes that the answers of a task were fitted to."""

    raw: frozenset[str]  # by its readout, or by the readouts and the thresholds of its cascade
    calibrated: frozenset[str]  # by its calibration, too
    silent: tuple[str, ...]  # files that do not name their texts: earlier versions wrote them

    @classmethod
    def of(cls, spec: JobSpec, task: TaskSpec) -> FittedTexts:
        """The texts of all files that the task names; SpecError if one cannot be read."""
        of_readouts = {path: _card_texts(spec, task, path) for path in _readouts(task)}
        silent = [path for path, texts in of_readouts.items() if not texts]
        raw, calibrated = {text for texts in of_readouts.values() for text in texts}, set[str]()
        if task.cascade is not None:
            path = task.cascade.file
            data = read_fitted(
                path,
                options_for(path, spec),
                place=_place(task, "cascade"),
                made_by="assay cascade",
            )
            texts = _texts_of(parse_thresholds(data).source)
            silent += [path] if texts is None else []
            raw.update(texts or ())
        # — of this task alone, or of this label of a task of kind `multi`
        file = load_calibrations(spec.model_copy(update={"tasks": (task,)})).get(task.name)
        if file is not None:
            texts = _texts_of(file.source)
            silent += [f"calibration of {task.name}"] if texts is None else []
            calibrated.update(texts or ())
        return cls(frozenset(raw), frozenset(raw | calibrated), tuple(silent))

    def of_version(self, version: str) -> frozenset[str]:
        """Of the raw or of the calibrated answers."""
        return self.raw if version == RAW else self.calibrated


def readout_texts(spec: JobSpec, task: TaskSpec) -> frozenset[str]:
    """The content hashes of a task's readout, or of the readouts of its stages."""
    return frozenset(text for path in _readouts(task) for text in _card_texts(spec, task, path))


def source_texts(gold: str | None, hashes: Collection[str]) -> dict[str, Any]:
    """What a fitted file says about its origin, for `FittedTexts`; `gold` is the gold's hash."""
    named = {"gold": gold} if gold is not None else {}
    return {**named, "texts": sorted(set(hashes))}


def is_held_out(content_hash: str, share: float) -> bool:
    """Whether a fit that holds out this share of all texts leaves this one out."""
    number: int = int(sha256_hex(f"{_SALT}{content_hash}".encode(), _HEX), 16)
    return bool(number < share * 16**_HEX)


def _readouts(task: TaskSpec) -> Iterator[str]:
    stages = () if task.cascade is None else task.cascade.stages
    yield from filter(None, (task.readout, *(stage.readout for stage in stages)))


def _card_texts(spec: JobSpec, task: TaskSpec, path: str) -> tuple[str, ...]:
    place = _place(task, "readout")
    data = read_fitted(path, options_for(path, spec), place=place, made_by="assay fit")
    try:
        return parse_readout(data).card.texts
    except ReadoutError as error:
        raise SpecError([Problem(place, str(error), path)]) from error


def _place(task: TaskSpec, key: str) -> str:
    return f"tasks.{task.name}.{key}"


def _texts_of(source: Mapping[str, Any]) -> list[str] | None:
    """The texts that a file names; None if it was fitted to some and does not name them."""
    texts = source.get("texts")
    if texts is None and ("gold" in source or "truth" in source):
        return None
    return list(texts or ())
