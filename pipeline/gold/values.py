"""The values of a column of gold, as labels of a task or as scores of a label.

Entry points: `column_tasks` for a column of a file, `teacher_tasks` for another run's answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from math import isnan, nan

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.errors import Option, Problem, SpecError
from pipeline.gold.files import GoldRows, gold_error
from pipeline.hashes import parse_json
from pipeline.ledger.columns import probabilities
from pipeline.spec.gold import ScoreColumn
from pipeline.spec.labels import NO, YES, task_of
from pipeline.spec.tasks import TaskSpec

UNLABELLED = -1
# The numbers of unknown values and of labels that an error lists.
SHOWN_PROBLEMS, SHOWN_LABELS = 10, 12
# In the column of a task of kind `multi`: between labels, and instead of labels where none applies.
BETWEEN, NONE = ";", "-"
Meanings = Mapping[str, Sequence[str]]  # labels, by the value that means them
# In the column of one label. pandas writes True, and 1.0 where another row has no value.
_YES_OR_NO = {
    **dict.fromkeys(("true", "True", "1", "1.0"), YES),
    **dict.fromkeys(("false", "False", "0", "0.0"), NO),
}


@dataclass(frozen=True, slots=True)
class GoldTask:
    """The gold labels of one task, or of a label of a task of kind `multi`."""

    labels: tuple[str, ...]  # the task's, in the spec's order
    truth: NDArray[np.int64]  # [rows]: index of the label, or UNLABELLED
    soft: NDArray[np.float64] | None = None  # [rows, labels]: p or scores; NaN where unlabelled
    scored: str | None = None  # the label whose scores a file has


def column_tasks(
    rows: GoldRows,
    task: TaskSpec,
    column: str,
    meanings: Meanings,
    *,
    score: ScoreColumn | None,  # None: the column has labels
    keys: Sequence[str],  # [rows]: the documents of the rows
) -> dict[str, GoldTask]:
    """The gold of a column, by task; of a task of kind `multi`, by `TASK.LABEL`.

    SpecError names the values that are not labels.
    """
    if score is not None:
        return {task.name: _scored_task(rows, task, score, keys)}
    listed = [_listed(value, task) for value in rows.columns[column]]
    indices = _indices(rows, task, column, listed, meanings)
    labelled = np.array([labels is not None for labels in listed])
    if task.kind != "multi":
        truth = [labels[0] if labels else UNLABELLED for labels in indices]
        return {task.name: GoldTask(tuple(task.labels), np.array(truth, np.int64))}
    has = np.zeros((len(task.labels), len(listed)), np.bool_)
    for row, labels in enumerate(indices):
        has[labels, row] = True
    return {
        part.name: GoldTask((YES, NO), np.where(labelled, np.where(own, 0, 1), UNLABELLED))
        for part, own in zip(task.parts, has, strict=True)
    }


def _listed(value: object, task: TaskSpec) -> list[str] | None:
    """The labels that a value names, as they are written in the spec; None for no value."""
    if task.kind == "multi":
        if isinstance(value, str) and value.startswith("["):
            with suppress(ValueError):
                value = parse_json(value)
        if isinstance(value, list | tuple):
            return [_written(label) or "" for label in value]
    written = _written(value)
    if written is None or task.kind != "multi":
        return None if written is None else [written]
    if written == NONE and NONE not in task.labels:
        return []
    return [label.strip() for label in written.split(BETWEEN) if label.strip()]


def _indices(
    rows: GoldRows,
    task: TaskSpec,
    column: str,
    listed: Sequence[Sequence[str] | None],  # [rows]
    meanings: Meanings,
) -> list[list[int]]:  # [rows]
    """The numbers of the labels that each row lists."""
    names = _label_names(task, meanings)
    times = Counter(label for of_row in listed for label in of_row or () if label not in names)
    if task.kind == "score":
        numbers = {float(label): index for label, index in names.items() if _is_number(label)}
        names |= {v: numbers[float(v)] for v in times if _is_number(v) and float(v) in numbers}
        times = Counter({value: count for value, count in times.items() if value not in names})
    is_part = task_of(task.name) != task.name
    if len(task.labels) == 2 and _are_scores(times):
        label = "" if is_part or task.name in task.labels else ".LABEL"
        fix = f"the values of {column} are numbers from 0 to 1, and no labels of task {task.name}; "
        fix += f"if they are scores, write {task.name}{label}: {column} below gold.scores"
        raise gold_error(rows.path, fix)
    if times:
        raise SpecError(
            [
                Problem(
                    rows.place(
                        next(n for n, of in enumerate(listed) if value in (of or ())), column
                    ),
                    f"{_not_a_label(task, value)} (rows with it: {times[value]:,})",
                    value,
                )
                for value in list(times)[:SHOWN_PROBLEMS]
            ]
        )
    return [[names[label] for label in of_row or ()] for of_row in listed]


def _is_number(value: str) -> bool:
    with suppress(ValueError):
        return not isnan(float(value))
    return False


def _label_names(task: TaskSpec, meanings: Meanings) -> dict[str, int]:
    """Gold value -> index of its label."""
    names = {label: index for index, label in enumerate(task.labels)}
    mapped = {
        v: names[label] for v, labels in meanings.items() for label in labels if label in names
    }
    is_part = task_of(task.name) != task.name
    usual = {value: names[label] for value, label in _YES_OR_NO.items()} if is_part else {}
    return {**usual, **names, **mapped}


def _not_a_label(task: TaskSpec, value: str) -> str:
    """What to write for a gold value that is not a label."""
    shown = ", ".join(list(task.labels)[:SHOWN_LABELS])
    more = f" and {len(task.labels) - SHOWN_LABELS:,} more" * (len(task.labels) > SHOWN_LABELS)
    if task.kind == "score" and _is_number(value):
        low, high = task.values[0], task.values[-1]
        if low < float(value) < high:
            fix = "is between labels; round the column to the nearest label"
        else:
            fix = f"is outside {low:g} to {high:g}; correct it"
        return f"{fix}: task {task.name} has {shown}{more}"
    return (
        f"is not a label of task {task.name}, which has {shown}{more}; write {value}: LABEL below "
        "gold.values, or leave the task out with --task"
    )


def _written(value: object) -> str | None:
    """A gold value as its label is written in the spec; None for a row without a label."""
    if value is None or value == "" or value != value:  # NaN
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def teacher_tasks(
    answers: pa.StructArray,  # [rows]
    teacher_labels: tuple[str, ...],
    task: TaskSpec,
    meanings: Meanings,
    source: str,
) -> dict[str, GoldTask]:
    """The answers of another run as soft targets, by task or, of kind `multi`, by `TASK.LABEL`.

    A label of a task of kind `multi` that the teacher does not have is left out. SpecError if the
    teacher has other labels, or is of kind `multi` where the task is not.
    """
    if (answers.type.get_field_index("labels") >= 0) != (task.kind == "multi"):
        fix = f"task {task.name} is of kind {task.kind}, and the teacher's task is "
        fix += "not" if task.kind == "multi" else "of kind multi"
        raise gold_error(source, f"{fix}; name another one: {task.name}: TASK below gold.columns")
    names = _label_names(task, meanings)
    if unknown := [label for label in teacher_labels if label not in names]:
        place = Option(part=source)
        raise SpecError([Problem(place, _not_a_label(task, label), label) for label in unknown])
    p = probabilities(answers, teacher_labels)  # [rows, theirs]
    if task.kind == "multi":
        # — several of the teacher's labels may mean one: it applies if the likeliest of them does
        of_label = [
            [n for n, of in enumerate(teacher_labels) if names[of] == k]
            for k in range(len(task.labels))
        ]
        pairs = zip(task.parts, of_label, strict=True)
        yes = {part.name: p[:, own].max(axis=1) for part, own in pairs if own}
        return {
            name: _soft_task((YES, NO), np.stack([q, 1 - q], axis=1)) for name, q in yes.items()
        }
    soft = np.zeros((len(p), len(task.labels)))
    for index, label in enumerate(teacher_labels):
        soft[:, names[label]] += p[:, index]
    return {task.name: _soft_task(tuple(task.labels), soft)}


def _soft_task(
    labels: tuple[str, ...], soft: NDArray[np.float64], scored: str | None = None
) -> GoldTask:
    """Targets [rows, labels], of which the likeliest label is the gold label."""
    unanswered = np.asarray(np.isnan(soft).any(axis=1))
    targets = np.where(unanswered.reshape(-1, 1), np.nan, soft)
    truth: NDArray[np.int64] = np.where(unanswered, UNLABELLED, soft.argmax(axis=1))
    return GoldTask(labels, truth, targets, scored)


def _scored_task(
    rows: GoldRows, task: TaskSpec, score: ScoreColumn, keys: Sequence[str]
) -> GoldTask:
    """The mean score of each row's document as a soft target, NaN for one without scores.

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
    means, labels = _means(scores, keys), tuple(task.labels)
    of_label = [means, 1 - means] if score.label == labels[0] else [1 - means, means]
    return _soft_task(labels, np.stack(of_label, axis=1), score.label)


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


def _are_scores(values: Iterable[str]) -> bool:
    """Whether all are numbers from 0 to 1, and one has a fraction: 0 and 1 alone may be labels."""
    try:
        numbers = [_score(value) for value in values]
    except ValueError:
        return False
    return any(not isnan(number) and not number.is_integer() for number in numbers)
