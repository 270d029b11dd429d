"""Gold labels of a spec, and what must hold for a run to publish its answers.

Entry points: `GoldSpec` and `PublishSpec`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator, Field, FiniteFloat, model_validator

from pipeline.spec.labels import YES, task_of
from pipeline.spec.locations import Location
from pipeline.spec.model import Frozen, Mistake
from pipeline.spec.tasks import TaskSpec

_Share = Annotated[float, Field(ge=0, le=1)]
_Labels = Annotated[
    tuple[str, ...],
    BeforeValidator(
        lambda labels: labels if isinstance(labels, list | tuple) else [labels],
        json_schema_input_type=str | tuple[str, ...],
    ),
]


class ScoreColumn(NamedTuple):
    """The column with the scores of one label of a task."""

    label: str
    column: str


class GoldSpec(Frozen):
    """Gold labels, that people or a better model gave to some documents, and how they are read."""

    path: Location | None = Field(default=None, min_length=1)
    """CSV, TSV, JSON lines or Parquet file with a column for each task, or a file of `assay review`
    or the output of another run. `--gold` replaces it."""
    id: str | None = Field(default=None, min_length=1)
    """Column of the gold file with document ids. Default: `input.id`, or `id`."""
    text: str | None = Field(default=None, min_length=1)
    """Column of the gold file with texts, to match documents by text instead of by id. Default:
    `input.text`, if the file has no column of ids."""
    columns: dict[str, str] = Field(default={})
    """Column with the labels of a task, where it does not have the task's name: `toxic: is_toxic`.
    Of a task of kind `multi`, `TASK.LABEL: COLUMN` is a column of yes or no for one label."""
    values: dict[str, _Labels] = Field(default={})
    """Label that a value of the gold means, where it is not the label's name: `Not Toxic: clean`.
    A list has labels of several tasks."""
    scores: dict[str, str] = Field(default={})
    """Column with scores from 0 to 1 of the label that has the task's name: `toxic: TOXICITY`.
    `TASK.LABEL: COLUMN` is for another label. The task has two labels, or is of kind `multi`."""

    @model_validator(mode="after")
    def _matches_by_one(self) -> GoldSpec:
        if self.id and self.text:
            raise ValueError("rows are matched by id or by text; remove one of the two")
        return self

    def score_columns(self, tasks: Sequence[TaskSpec]) -> dict[str, ScoreColumn]:
        """The columns with scores, by task or part of a task."""
        parts = {part.name for task in tasks for part in task.parts}
        return {
            name: ScoreColumn(label, column)
            for written, column in self.scores.items()
            for name, label in [_scored(written, parts)]
        }

    def mistakes(self, tasks: Sequence[TaskSpec]) -> Iterator[Mistake]:
        """Names of tasks and labels that these tasks do not have, and columns that contradict."""
        parts = {part.name: part for task in tasks for part in (task, *task.parts)}
        unknown = f"no such task; the spec has {', '.join(task.name for task in tasks)}"
        for name in self.columns:
            if name not in parts:
                yield ("columns", name), unknown
            elif name != task_of(name) and task_of(name) in self.columns:
                fix = f"{task_of(name)} also has a column for all of its labels; remove one"
                yield ("columns", name), fix
        for value, labels in self.values.items():
            conflicting = [
                own for p in parts.values() if len(own := {*p.labels}.intersection(labels)) > 1
            ]
            if any(all(label not in part.labels for part in parts.values()) for label in labels):
                yield ("values", value), "no task has such a label; write GOLD_VALUE: LABEL"
            elif conflicting:
                fix = f"means {len(conflicting[0])} labels of one task; write the one that it means"
                yield ("values", value), fix
        yield from self._mistakes_of_scores(parts, unknown)

    def _mistakes_of_scores(self, parts: dict[str, TaskSpec], unknown: str) -> Iterator[Mistake]:
        columns: dict[str, str] = {}
        for written, column in self.scores.items():
            name, label = _scored(written, parts)
            if name not in parts:
                fix = unknown
            elif name in self.columns:
                fix = f"{name} also has a column of labels, {self.columns[name]}; remove one"
            elif name in columns:
                fix = f"{name} also has scores in column {columns[name]}; remove one"
            else:
                fix = _wrong_label(parts[name], label, column)
                columns[name] = column
            if fix:
                yield ("scores", written), fix


def _scored(written: str, parts: set[str] | dict[str, TaskSpec]) -> tuple[str, str]:
    """The task, or the part of one, and the label that scores are of."""
    if written != task_of(written) and written in parts:
        return written, YES
    name, _, label = written.partition(".")
    return name, label or name


def _wrong_label(task: TaskSpec, label: str, column: str) -> str:
    """Why scores cannot be those of this label of the task, or ''."""
    labels = tuple(task.labels)
    if task.kind == "multi":
        return f"scores are of one label; write {task.name}.{labels[0]}: {column}"
    if len(labels) != 2:
        return f"a score needs a task with two labels; task {task.name} has {len(labels)}"
    if label in labels:
        return ""
    fix = " or ".join(f"{task.name}.{name}: {column}" for name in labels)
    return f"task {task.name} has no label {label}; write {fix}"


class PublishSpec(Frozen):
    """What must hold for a run to publish its answers. Otherwise the last snapshot stays current,
    and the exit code is 1."""

    gates: tuple[str, ...] = Field(default=())
    """Requirements such as `toxic.f1 >= 0.8`, judged by the labels of `gold`."""
    max_psi: FiniteFloat | None = Field(default=None, ge=0)
    """Largest population stability index of the label shares of a task, compared with the last
    snapshot; 0.1 is usual."""
    max_flip_rate: _Share | None = None
    """Largest share of the texts of both snapshots whose answer changed."""
    max_failing: _Share | None = None
    """Largest share of all rows that had an answer and have none now."""
    keep_promises: bool = False
    """Whether a cascade must prove what the last snapshot promised, or be answered by its last
    stage alone."""
