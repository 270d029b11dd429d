"""Tasks in stages: which documents a later stage is asked about, and the rows of all stages as one.

Entry points: `StagedTask.decides` and `StagedTask.rows`. A task with a cascade has a stage for each
of its models; one with `explain` has two: its answers, and the continuations of those that its
condition names. Must import neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.fitted.calibration import Calibration
from pipeline.fitted.cascade_file import Thresholds
from pipeline.ledger.columns import (
    EXPLANATION,
    EXPLANATION_TYPE,
    RAW,
    STAGE,
    answer_columns,
    answers_type,
    only,
    overlaid,
    probabilities,
    structs,
    with_column,
)
from pipeline.ledger.label_rows import with_calibrated
from pipeline.sources.rule import Rule
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec

Bools = NDArray[np.bool_]
# What a condition of `explain` may name, beside the column of its task.
_CONDITION_COLUMNS = ("doc_id", "n_chars", "status")


@dataclass(frozen=True, slots=True)
class StagedTask:
    """A task with a cascade, or with continuations."""

    task: TaskSpec
    thresholds: Thresholds | None  # of its cascade
    condition: Rule | None  # of its explain; None with a cascade, or if all answers are continued
    calibration: Calibration | None  # of its answers

    def decides(self, documents: pa.Table, answers: pa.StructArray) -> Bools:
        """[docs]: which answered documents no later stage is asked about.

        A document whose answer failed is one of them: its row says why.
        """
        if self.thresholds is not None:
            p = probabilities(answers, RAW, list(self.task.labels))  # [docs, labels]
            return np.isnan(p).any(axis=1) | self.thresholds.decides(p)
        has_label = np.array(pc.is_valid(answers.field("label")), np.bool_)
        if self.condition is None:
            return ~has_label
        rows = answers
        if self.calibration is not None:
            rows = with_calibrated(answers, self.task, [self.calibration])
        columns = [structs(documents).field(column) for column in _CONDITION_COLUMNS]
        schema = condition_schema(self.task)
        own = rows.cast(schema.field(self.task.name).type)
        batch = pa.record_batch([*columns, own], schema=schema)
        named = pc.fill_null(self.condition.verdicts(batch), False)
        return ~(has_label & np.array(named, np.bool_))

    def rows(
        self,
        unanswered: pa.StructArray,  # [docs]: label rows without an answer
        stages: Sequence[pa.StructArray | None],  # [docs] by stage: its answers, or null
        decided_by: NDArray[np.int8],  # [docs]: the stage that decided, from 1; 0: none
    ) -> pa.StructArray:
        """[docs] the rows of the task's label file."""
        rows = unanswered
        if self.thresholds is not None:
            for number, answers in enumerate(stages, start=1):
                chosen = decided_by == number
                if answers is not None and chosen.any():
                    rows = overlaid(only(answers, chosen), rows)
            stage = pa.array(decided_by, pa.int8(), mask=decided_by == 0)
            return with_column(rows, STAGE, stage)
        answers, continuations = stages
        rows = overlaid(answers, rows)
        if self.calibration is not None:
            rows = with_calibrated(rows, self.task, [self.calibration])
        explained = _explanations(continuations, decided_by == len(stages))
        return with_column(rows, EXPLANATION, explained)


def conditions(spec: JobSpec) -> dict[str, Rule]:
    """By task, the condition of its `explain`, if it has one; SpecError unless it can be read."""
    return {
        task.name: Rule(
            task.explain.when, condition_schema(task), place=f"tasks.{place}.explain.when"
        )
        for place, task in enumerate(spec.tasks)
        if task.explain is not None and task.explain.when is not None
    }


def condition_schema(task: TaskSpec) -> pa.Schema:
    """The columns that the condition of the task's `explain` may name."""
    types = dict(zip(_CONDITION_COLUMNS, (pa.string(), pa.int64(), pa.string()), strict=True))
    answers = answers_type(answer_columns(task.unexplained), list(task.labels))
    return pa.schema([*types.items(), (task.name, answers)])


def _explanations(continuations: pa.StructArray | None, named: Bools) -> pa.StructArray:
    """[docs] the column `explanation`: null where there is no continuation."""
    if continuations is None:
        return pa.nulls(len(named), EXPLANATION_TYPE)
    text = continuations.field("text")
    columns = [pc.struct_field(continuations, field.name) for field in EXPLANATION_TYPE]
    has_text = np.array(text.is_valid(), np.bool_) & np.array(continuations.is_valid(), np.bool_)
    return pa.StructArray.from_arrays(
        [column.cast(field.type) for column, field in zip(columns, EXPLANATION_TYPE, strict=True)],
        fields=list(EXPLANATION_TYPE),
        mask=pa.array(~(has_text & named)),
    )
