"""The errors assay raises, by who has to act.

    AssayError
    ├── SpecError       the user edits the spec            exit 2
    ├── RefusedError    an unsafe store or cluster         exit 4
    ├── StorageError    a store or an input file failed    exit 1
    │   ├── UnavailableError   it may work later: run again   exit 3
    │   └── UnreadableError    an input file's own content is broken
    ├── ModelError      the model cannot be used           exit 1
    ├── FailedRowsError more rows failed than may          exit 1
    └── DocumentError   this row is set aside with its reason, the run goes on

Knows nothing of what raises them or how they are shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class AssayError(Exception):
    """What the user or the world did; the message names the place, the value and the fix."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a spec: `tasks.1.labels: listed twice; list it once (got 'yes')`."""

    place: str
    fix: str
    value: object = None

    def __str__(self) -> str:
        return f"{self.place}: {self.fix} (got {self.value!r})"


class SpecError(AssayError):
    """The spec asks for something that cannot be done; one line a problem."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(tuple(problems))
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class RefusedError(AssayError):
    """Going on could lose or expose data, so nothing was started."""

    exit_code = 4


class StorageError(AssayError):
    """A store or an input file could not be read or written."""


class UnavailableError(StorageError):
    """A store did not answer, or the credentials ran out: what is committed stands, run again."""

    exit_code = 3


class UnreadableError(StorageError):
    """An input file's bytes came, and are not what its format asks for."""


class ModelError(AssayError):
    """The model cannot be loaded, or its attention is not one that assay models exactly."""


class FailedRowsError(AssayError):
    """More rows failed than `max_error_rate` allows."""


class DocumentError(AssayError):
    """This document cannot be labelled; its row carries the reason."""


def require_positive(arguments: Mapping[str, float | None]) -> None:
    """SpecError that names each argument that is given and is not a finite number above 0."""
    wrong = [
        Problem(name, "write a number above 0", value)
        for name, value in arguments.items()
        if value is not None and not (value > 0 and math.isfinite(value))
    ]
    if wrong:
        raise SpecError(wrong)
