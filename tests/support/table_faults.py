"""Tables of tiles with one mistake, as a kernel's loop with an off-by-one would read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline.inference.attention import tiles
from pipeline.inference.attention.tiles import TilePlan

Table = NDArray[np.int32]


def skip_a_block(table: Table, plan: TilePlan) -> None:
    """Tiles do not see the first 64 keys of the document."""
    table[:, tiles.WHOLE_FIRST] = np.minimum(
        table[:, tiles.WHOLE_FIRST] + 64, table[:, tiles.WHOLE_STOP]
    )


def end_early(table: Table, plan: TilePlan | None = None) -> None:
    table[:, tiles.WHOLE_STOP] = np.maximum(
        table[:, tiles.WHOLE_STOP] - 1, table[:, tiles.WHOLE_FIRST]
    )


def begin_the_prefix_late(table: Table, plan: TilePlan) -> None:
    table[:, tiles.PREFIX_FIRST] = np.minimum(
        table[:, tiles.PREFIX_FIRST] + 1, plan.tree.prefix_tokens
    )


def begin_their_own_rows_late(table: Table, plan: TilePlan) -> None:
    table[:, tiles.OWN_FIRST] = np.minimum(table[:, tiles.OWN_FIRST] + 1, table[:, tiles.STOP] - 1)


FAULTS = [skip_a_block, end_early, begin_the_prefix_late, begin_their_own_rows_late]


@contextmanager
def planted(fault: Callable[[Table, TilePlan], None]) -> Iterator[None]:
    """Every table has the mistake inside the block."""
    right = TilePlan.tiles

    def wrong(plan: TilePlan, rows: int) -> torch.Tensor:
        table = right(plan, rows).numpy().copy()
        fault(table, plan)
        return torch.from_numpy(table)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TilePlan, "tiles", wrong)
        yield
