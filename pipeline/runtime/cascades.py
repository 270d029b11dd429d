"""Tasks with a cascade: which documents a later stage is asked about, and the rows of all stages.

Entry points: `StagedTask.decides` and `StagedTask.rows`. Must import neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.fitted.cascade_file import Thresholds
from pipeline.ledger.columns import RAW, STAGE, Bools, only, overlaid, probabilities, with_column
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
        p = probabilities(answers, RAW, list(self.task.labels))  # [docs, labels]
        return np.isnan(p).any(axis=1) | self.thresholds.decides(p)

    def rows(
        self,
        unanswered: pa.StructArray,  # [docs]: label rows without an answer
        stages: Sequence[pa.StructArray | None],  # [docs] by stage: its answers, or null
        decided_by: NDArray[np.int8],  # [docs]: the stage that decided, from 1; 0: none
    ) -> pa.StructArray:
        """[docs] the rows of the task's label file."""
        rows = unanswered
        for number, answers in enumerate(stages, start=1):
            chosen = decided_by == number
            if answers is not None and chosen.any():
                rows = overlaid(only(answers, chosen), rows)
        stage = pa.array(decided_by, pa.int8(), mask=decided_by == 0)
        return with_column(rows, STAGE, stage)
