"""Tasks with a cascade: which documents a later stage is asked about, and the rows of all stages.

Entry points: `StagedTask.decides` and `StagedTask.rows`. Must import neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.fitted.cascade_file import Thresholds
from pipeline.ledger.columns import STAGE, Bools, only, overlaid, probabilities, with_column
from pipeline.spec.tasks import TaskSpec


@dataclass(frozen=True, slots=True)
class StagedTask:
    """A task with a cascade."""

    task: TaskSpec
    thresholds: Thresholds

    def decides(self, answers: pa.StructArray) -> Bools:
        """[docs]: which answered documents no later stage is asked about.

        A document whose answer failed is one of them: its row says why.
        """
        p = probabilities(answers, list(self.task.labels))  # [docs, labels]
        return np.isnan(p).any(axis=1) | self.thresholds.decides(p)

    def rows(
        self,
        unanswered: pa.StructArray,  # [docs]: label rows without an answer
        stages: Sequence[pa.StructArray | None],  # [docs] by stage: its answers, or null
    ) -> pa.StructArray:
        """[docs] the rows of the task's label file: the answers of the stage that decides."""
        rows, open_rows = unanswered, np.ones(len(unanswered), np.bool_)
        decided_by = np.zeros(len(unanswered), np.int8)
        for number, answers in enumerate(stages, start=1):
            if answers is None:
                continue
            decided = open_rows & np.array(answers.is_valid(), np.bool_)
            if number < len(stages) and decided.any():
                decided &= self.decides(answers)
            rows = overlaid(only(answers, decided), rows)
            decided_by[decided] = number
            open_rows &= ~decided
        stage = pa.array(decided_by, pa.int8(), mask=decided_by == 0)
        return with_column(rows, STAGE, stage)
