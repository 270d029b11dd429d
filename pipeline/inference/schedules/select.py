"""How a prompt's levels go through a model: all in one forward, or level by level.

Two schedules, same numbers. Knows which one a model takes. Knows nothing of labels or batching.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.fused import FusedSchedule
from pipeline.inference.schedules.interface import Schedule
from pipeline.inference.schedules.staged import StagedSchedule


def read_prefix(
    model: LoadedModel, prefix: Sequence[int], *, layers: int | None = None
) -> Schedule:
    """The model's own schedule, ready for documents below the prefix.

    With `layers`, nothing deeper can be asked for.
    """
    if model.schedule == "staged":
        return StagedSchedule(model, prefix, layers=layers)
    return FusedSchedule(model, prefix, layers=layers)
