"""The texts that a task's answers were fitted to, which must not be used to evaluate them.

Entry points: `fitted_texts`, `is_held_out` for the texts that a fit leaves out, and
`cross_validated` for what the fit itself measured. A text is known by its content hash: so rows of
another gold set, or of another output, count.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.errors import Problem, SpecError
from pipeline.evaluation.intervals import Figure
from pipeline.fitted.readout import Card, ReadoutError, parse_readout
from pipeline.hashes import sha256_hex, validated
from pipeline.runtime.fitted_files import options_for, read_fitted
from pipeline.spec.labels import task_of
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec

# If texts were left out, at least this many others make a figure.
LEAST_ROWS = 30
_SALT = "hold out "  # so that the share is independent of other choices by content hash
_HEX = 8


def fitted_texts(spec: JobSpec, task: TaskSpec) -> frozenset[str]:
    """The content hashes of the texts of the readout of a task, or of a label of kind `multi`; of
    a cascade those of the readouts of all its stages.

    SpecError if a file that the task names cannot be read.
    """
    return frozenset(text for card in _cards(spec, task) for text in card.texts)


def cross_validated(spec: JobSpec, task: TaskSpec) -> dict[str, Figure]:
    """What the fit of a task's readout measured on held-out rows; {} without a readout."""
    cards = () if spec.task(task_of(task.name)).stages else _cards(spec, task)
    return {name: validated(Figure, of) for card in cards for name, of in card.scores.items()}


def is_held_out(content_hash: str, share: float) -> bool:
    """Whether a fit that holds out this share of all texts leaves this one out."""
    number: int = int(sha256_hex(f"{_SALT}{content_hash}".encode(), _HEX), 16)
    return bool(number < share * 16**_HEX)


def _cards(spec: JobSpec, task: TaskSpec) -> Iterator[Card]:
    place, whole = f"tasks.{task.name}.readout", spec.task(task_of(task.name))
    own = (p for stage in whole.stages or (whole,) for p in stage.parts if p.name == task.name)
    for path in filter(None, (part.readout for part in own)):
        data = read_fitted(path, options_for(path, spec), place=place)
        try:
            yield parse_readout(data).card
        except ReadoutError as error:
            raise SpecError([Problem(place, str(error), path)]) from error
