"""Scores of a label in a column of a gold file, such as another service's probabilities.

Entry points: `score_columns` for the columns of the options, `read_targets` for their values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import isnan, nan

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import Option, Problem, SpecError
from pipeline.gold.files import GoldRows
from pipeline.options import GoldOptions
from pipeline.spec.labels import YES, task_of
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec

PLACE = Option("scores")


@dataclass(frozen=True, slots=True)
class ScoreColumn:
    """The column with the scores of one label of a task."""

    label: str
    column: str


def score_columns(spec: JobSpec, options: GoldOptions) -> dict[str, ScoreColumn]:
    """The columns of `options.scores`, by task; SpecError if a task or its label is not clear.

    `TASK=COLUMN` has the scores of the label with the task's name, `TASK.LABEL=COLUMN` those of
    another label, or of a label of a task of kind `multi`.
    """
    tasks = {task.name: task for task in spec.tasks}
    of_columns = dict(options.columns)
    columns: dict[str, ScoreColumn] = {}
    problems = []
    for written, column in options.scores:
        name, _, label = written.partition(".")
        if name in tasks and tasks[name].kind == "multi":
            name, label = (written, YES) if label in tasks[name].labels else (name, label)
        if task_of(name) not in tasks:
            fix = f"the spec has no such task; it has {', '.join(tasks)}"
        elif name in of_columns:
            fix = f"task {name} also has --column {name}={of_columns[name]}; write one of them"
        elif name in columns:
            fix = f"task {name} also has scores in column {columns[name].column}; write one of them"
        else:
            fix = (
                ""
                if name == written != task_of(name)
                else _label_problem(tasks[name], label, column)
            )
            columns[name] = ScoreColumn(label or name, column)
        if fix:
            problems.append(Problem(PLACE, fix, f"{written}={column}"))
    if problems:
        raise SpecError(problems)
    return columns


def _label_problem(task: TaskSpec, label: str, column: str) -> str:
    """Why scores cannot be those of this label of the task (default: its own name), or ''."""
    labels = tuple(task.labels)
    if task.kind == "multi":
        return f"scores are of one label; write {task.name}.{labels[0]}={column}"
    if len(labels) != 2:
        return f"a score needs a task with two labels; task {task.name} has {len(labels)}"
    if (label or task.name) in labels:
        return ""
    fix = " or ".join(f"{task.name}.{name}={column}" for name in labels)
    if label:
        return f"task {task.name} has no label {label}; write {fix}"
    return f"no label of task {task.name} has its name; write {fix}"


def read_targets(
    rows: GoldRows,
    score: ScoreColumn,
    labels: Sequence[str],  # the task's two
    keys: Sequence[str],  # [rows]: the documents of the rows
) -> NDArray[np.float64]:  # [rows, labels]
    """The soft targets of the rows: the mean score of a row's document, NaN for one without scores.

    SpecError for a value that is not a number from 0 to 1.
    """
    scores = np.full(rows.rows, nan)
    wrong = []
    for row, value in enumerate(rows.columns[score.column]):
        try:
            scores[row] = _score(value)
        except ValueError:
            wrong.append(row)
    if wrong:
        fix = f"is not a number from 0 to 1 (such rows: {len(wrong):,}); write the score as "
        fix += "one, or leave the value empty if the row has none"
        value = rows.columns[score.column][wrong[0]]
        raise SpecError([Problem(rows.place(wrong[0], score.column), fix, value)])
    means = _means(scores, keys)
    targets = np.stack([means, 1 - means], axis=1)
    return targets if score.label == labels[0] else targets[:, ::-1]


def _means(scores: NDArray[np.float64], keys: Sequence[str]) -> NDArray[np.float64]:  # [rows] each
    """The mean score of each row's document."""
    documents, document = np.unique(np.array(keys, np.str_), return_inverse=True)
    scored = ~np.isnan(scores)
    sums = np.bincount(document[scored], scores[scored], len(documents))
    times = np.bincount(document[scored], minlength=len(documents))
    means = np.divide(sums, times, where=times > 0, out=np.full(len(documents), nan))
    return np.asarray(means[document], np.float64)


def _score(value: object) -> float:
    """A value as a score, or NaN without one; ValueError if it is neither."""
    if value is None or value == "" or value != value:  # NaN
        return nan
    # — Python reads 1_0 as 10, and True as 1
    if not isinstance(value, (int, float, Decimal, str)) or isinstance(value, bool):
        raise ValueError
    if isinstance(value, str) and "_" in value:
        raise ValueError
    number = float(value)
    if not 0 <= number <= 1:
        raise ValueError
    return number


def are_scores(values: Iterable[str]) -> bool:
    """Whether all are numbers from 0 to 1, and one has a fraction: 0 and 1 alone may be labels."""
    try:
        numbers = [_score(value) for value in values]
    except ValueError:
        return False
    return any(not isnan(number) and not number.is_integer() for number in numbers)
