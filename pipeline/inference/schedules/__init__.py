"""How a decoder is run over the tree. Entry point: `read_prefix`, which chooses the schedule."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.fused import FusedSchedule
from pipeline.inference.schedules.interface import Schedule
from pipeline.inference.schedules.staged import StagedSchedule


def read_prefix(
    model: LoadedModel, prefix: Sequence[int], *, layers: int | None = None
) -> Schedule:
    """The model's schedule, with the prefix read: ready for documents below it.

    With `layers`, the prefix is read to that layer, and no read point may be deeper.
    """
    if model.schedule == "staged":
        return StagedSchedule(model, prefix, layers=layers)
    return FusedSchedule(model, prefix, layers=layers)
