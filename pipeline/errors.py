"""The exceptions of assay, by who has to act.

AssayError
├── SpecError       the user edits the spec            exit 2
│   └── MissingColumnsError   an input file lacks columns that the spec names
├── RefusedError    an unsafe store or cluster         exit 4
├── StorageError    a store or an input file failed    exit 1
│   ├── UnavailableError   may succeed later: run again   exit 3
│   ├── ServerError        a model's server; it ends a run at once   exit 3
│   └── UnreadableError    an input file's own content is broken
│       └── ForeignContentError   its format is not the one of its name   exit 2
├── ModelError      the model cannot be used           exit 1
├── WorkerError     this worker cannot go on           exit 1
│   └── LoadError          it cannot load what it needs to answer
├── FailedRowsError too many rows failed               exit 1
├── StalledError    the workers stopped                exit 3
└── DocumentError   this row gets the reason as its status, the run continues
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self


class AssayError(Exception):
    """An error that the user can act on; its message names the place, the value and the fix."""

    exit_code = 1
    """Exit code of the command."""


class Option(str):
    """The place of a mistake in an argument: the names of options, and a part of their value.

    Without a name it is a part of a file that is not the spec's.

    A name is that of a field of the library's options, or of a parameter of its functions. The
    command shows its own names: `gold a.csv, row 3` is `--gold a.csv, row 3` there.
    """

    names: tuple[str, ...]
    part: str

    def __new__(cls, *names: str, part: str = "") -> Self:
        """`names` are joined by commas; `part` follows them."""
        option = super().__new__(cls, ", ".join(names) + part)
        option.names, option.part = names, part
        return option


# A value may be a whole file that is not a spec.
_VALUE_CHARS = 200


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a spec: `tasks.1.labels: listed twice; list it once (got 'yes')`.

    The message of a StorageError or a RefusedError about an option is a Problem, too.
    """

    place: str
    """A key of the spec, an `Option`, or a file."""
    fix: str
    value: object = None
    """What the user wrote; None if nothing is there. Errors show its start."""
    where: str = ""
    """The file, line and task of a mistake in a spec's file: `my.yaml, line 12, task 'topic'`."""

    def __str__(self) -> str:
        where = f" in {self.where}" if self.where else ""
        text = "" if self.value is None else repr(self.value)
        shown = text if len(text) <= _VALUE_CHARS else text[:_VALUE_CHARS] + "…"
        return f"{self.place}: {self.fix}{shown and f' (got {shown})'}{where}"

    def renamed(self, name_of: Callable[[str], str]) -> Problem:
        """The same with other names of the options that are its place."""
        if not isinstance(self.place, Option):
            return self
        names = map(name_of, self.place.names)
        return replace(self, place=Option(*names, part=self.place.part))


class SpecError(AssayError):
    """The spec or an argument is wrong; the message has one line a problem."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(tuple(problems))
        self.problems = tuple(problems)
        """The mistakes, each with its `place`, `fix` and `value`."""

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)

    def __reduce__(self) -> tuple[type[SpecError], tuple[tuple[Problem, ...]]]:
        """Pickled by its problems: Ray Data adds its advice to `args`."""
        return type(self), (self.problems,)


class MissingColumnsError(SpecError):
    """An input file lacks columns that the spec names, or has no rows of objects at all."""


class RefusedError(AssayError):
    """Continuing could lose or expose data, so nothing was started."""

    exit_code = 4


class StorageError(AssayError):
    """A store or an input file could not be read or written."""


class UnavailableError(StorageError):
    """A store or Ray did not answer, or credentials expired. Committed results stay; run again."""

    exit_code = 3


class ServerError(StorageError):
    """A model's server does not answer, answers as another model, or has reached the cost limit.

    No shard can be labelled now, so the run ends. Committed and paid answers stay; run again.
    """

    exit_code = 3


class UnreadableError(StorageError):
    """An input file was read, and its content violates its format."""


class ForeignContentError(UnreadableError):
    """A local or remote file was read, and its format is not the one that its name has."""

    exit_code = 2


class ModelError(AssayError):
    """The model cannot be loaded, or assay does not support its attention exactly."""


class WorkerError(AssayError):
    """A worker cannot go on with these rows. It ends, and another worker tries them again."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        self.cause = cause
        """The error that the worker met."""

    def __str__(self) -> str:
        if isinstance(self.cause, AssayError):
            return one_line(self.cause)
        return f"{type(self.cause).__name__}: {one_line(self.cause)}"


class LoadError(WorkerError):
    """A worker cannot load a model, a tokenizer or a classifier. Another machine may."""

    @property
    def reason(self) -> AssayError:
        """The error that ends a run in which no worker can load: the cause if it is of assay."""
        return self.cause if isinstance(self.cause, AssayError) else ModelError(str(self))


class FailedRowsError(AssayError):
    """The share of failed rows exceeds `max_error_rate`."""


class StalledError(AssayError):
    """No worker can go on. Finished shards are kept; run again."""

    exit_code = 3


class DocumentError(AssayError):
    """This document cannot be labelled; the status of its row is the reason."""


def one_line(error: BaseException) -> str:
    """The message of an error on one line, or its type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def listed(names: Iterable[str]) -> str:
    """The names joined by commas; a name that is not a plain word is in quotes."""
    return ", ".join(name if re.fullmatch(r"[\w.-]+", name) else repr(name) for name in names)


def option_error(name: str, fix: str, value: object = None) -> SpecError:
    """The error of one wrong option, by the name of its field or parameter."""
    return SpecError([Problem(Option(name), fix, value)])


def require_positive(options: object, *names: str) -> None:
    """SpecError for each of these fields that is not None and not a finite number above 0."""
    _require(options, names, lambda v: v > 0 and math.isfinite(v), "write a number above 0")


def require_up_to(options: object, most: int, *names: str) -> None:
    """SpecError for each of these fields that is not None and not from 0 to `most`."""
    fix = f"write a whole number from 0 to {most}"
    _require(options, names, lambda v: 0 <= v <= most, fix)


def require_share(options: object, *names: str) -> None:
    """SpecError for each of these fields that is not None and not above 0, up to 1."""
    _require(options, names, lambda v: 0 < v <= 1, "write a share above 0, up to 1")


def _require(
    options: object, names: Sequence[str], holds: Callable[[float], bool], fix: str
) -> None:
    values = ((name, getattr(options, name)) for name in names)
    wrong = [Problem(Option(n), fix, v) for n, v in values if v is not None and not holds(v)]
    if wrong:
        raise SpecError(wrong)
