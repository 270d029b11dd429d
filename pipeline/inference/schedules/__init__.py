"""How a decoder is run over the tree. Entry point: `read_prefix`, which chooses the schedule.

Both schedules compute the same numbers. A schedule's `reader` is prepared once for any documents.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.fused import FusedSchedule
from pipeline.inference.schedules.staged import StagedSchedule

Schedule = FusedSchedule | StagedSchedule


def read_prefix(model: LoadedModel, prefix: Sequence[int]) -> Schedule:
    """The model's schedule, with the prefix read: ready for documents below it."""
    schedule = StagedSchedule if model.schedule == "staged" else FusedSchedule
    return schedule.from_prefix(model, prefix)
