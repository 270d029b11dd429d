"""How a decoder is run over the tree. Entry point: `read_prefix`, which chooses the schedule.

Both schedules compute the same numbers. A schedule's `reader` is prepared once for any documents.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.inference.model.loaded import LoadedModel
from pipeline.inference.schedules.batching import Usage
from pipeline.inference.schedules.fused import FusedReader, FusedSchedule
from pipeline.inference.schedules.staged import StagedReader, StagedSchedule

Schedule = FusedSchedule | StagedSchedule


def read_prefix(
    model: LoadedModel, prefix: Sequence[int], *, layers: int | None = None
) -> Schedule:
    """The model's schedule, with the prefix read: ready for documents below it.

    With `layers`, the prefix is read to that layer, and no read point may be deeper.
    """
    schedule = StagedSchedule if model.schedule == "staged" else FusedSchedule
    return schedule.from_prefix(model, prefix, layers=layers)


def tokens_read(reader: FusedReader | StagedReader, documents: Sequence[Sequence[int]]) -> Usage:
    """The tokens that a reader puts through the model for these documents."""
    count, own = len(documents), sum(map(len, documents))
    return Usage(own + count * reader.repeated_prefix_tokens, count * reader.question_tokens)
