"""A tree's attention as tiles of queries, for a kernel that reads keys where they are.

Entry points: `tile_plan`, and `to_device`. A tile is some neighbouring rows of one document, or of
one copy of the branches. All of them see a range of keys whole: the prefix, and what of the
document is before them. The keys among themselves are seen by the rule of the tree: a row sees the
rows before it whose subtree it is in. The tables are made once a batch, and the layers run without
a device-to-host read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.inference.attention.reference import Attended, LayerKV
from pipeline.inference.attention.tree import Tree

Integers = NDArray[np.int64]


# The columns of a table of tiles. Rows are counted from the batch's first one.
FIRST, STOP = 0, 1  # its rows
PREFIX_FIRST = 2  # the first row of the prefix that one of them sees
WHOLE_FIRST, WHOLE_STOP = 3, 4  # what of the document all of them see, where no window hides one
OWN_FIRST = 5  # from here to STOP: rows that are seen by the rule of the tree
DOCUMENT = 6  # its number


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Which keys the rows of a batch see in the layers of one window.

    Of its tile's own rows, a row sees itself and those before it whose subtree it is in: it comes
    before their `subtree_stops`. A window hides keys whose position is `window` or more below its
    own, in every range.
    """

    tree: Tree
    window: int | None
    first: int  # the first row that is a query
    subtree_stops: Tensor  # [tokens] int32: where the rows below this one end
    positions: Tensor  # [tokens] int32, counted from the root
    document_starts: Tensor  # [docs + 1] int32: the first row of each, and of what follows them
    _tables: dict[int, Tensor] = field(default_factory=dict)

    def tiles(self, rows: int) -> Tensor:  # [tiles, 7] int32
        """The tiles of at most this many rows; the table is made once."""
        if rows not in self._tables:
            table = _tiles(self.tree, rows, self.window, branches_only=self.first > 0)
            [flat] = to_device([table.ravel()], self.subtree_stops.device)
            self._tables[rows] = flat.view(table.shape)
        return self._tables[rows]


# Queries [tokens, heads, dim], the batch's own keys and values, those of the prefix, the plan,
# scale and softcap -> the attention of all queries.
Kernel = Callable[[Tensor, LayerKV, LayerKV | None, TilePlan, float, float | None], Attended]


def tile_plan(
    tree: Tree, device: torch.device, *, window: int | None, branches_only: bool
) -> TilePlan:
    """The plan of a batch, with the rule of the tree on the device.

    Args:
        window: Positions that a query sees, up to its own; None: all.
        branches_only: Whether the queries are the rows of the branches alone.
    """
    starts = np.append(tree.document_starts, tree.document_rows)
    stops, positions, starts_there = to_device(
        [array.astype(np.int32) for array in (tree.subtree_stops, tree.positions, starts)], device
    )
    first = tree.document_rows if branches_only else 0
    return TilePlan(tree, window, first, stops, positions, starts_there)


def _tiles(
    tree: Tree, rows: int, window: int | None, *, branches_only: bool
) -> NDArray[np.int32]:  # [tiles, 7]
    """All tiles, in the order of their rows."""
    starts, lengths = tree.document_starts, tree.documents
    parts = [] if branches_only else [_split(starts, lengths, rows)]
    copies = np.full(len(lengths), tree.branch_rows)
    parts.append(_split(tree.branch_starts, copies, rows))
    (document, first, stop) = (np.concatenate(column) for column in zip(*parts, strict=True))
    is_branch = first >= tree.document_rows
    whole_first = starts[document]
    whole_stop = np.where(is_branch, whole_first + lengths[document], first)
    own_first = first.copy()
    copy_first = tree.branch_starts[document[is_branch]]
    own_first[is_branch] = copy_first + tree.top_starts[first[is_branch] - copy_first]
    prefix_first = np.zeros_like(first)
    if window is not None and len(first):
        queries = tree.positions[first[0] :]
        seen_from = np.minimum.reduceat(queries, first - first[0]) - window + 1
        prefix_first = np.clip(seen_from, 0, tree.prefix_tokens)
        whole_first = np.clip(whole_first + seen_from - tree.prefix_tokens, whole_first, whole_stop)
    columns = [first, stop, prefix_first, whole_first, whole_stop, own_first, document]
    return np.stack(columns, axis=1).astype(np.int32)


def _split(starts: Integers, lengths: Integers, rows: int) -> tuple[Integers, Integers, Integers]:
    """Of each tile of these pieces: the piece, the first row and the last one's successor."""
    tiles = -(-lengths // rows)
    piece = np.repeat(np.arange(len(lengths)), tiles)
    number = np.arange(len(piece)) - np.repeat(tiles.cumsum() - tiles, tiles)
    first = starts[piece] + number * rows
    return piece, first, np.minimum(first + rows, starts[piece] + lengths[piece])


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """One-dimensional arrays of one dtype on the device, as parts of one buffer."""
    buffer = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":  # a copy from pageable memory would make the host wait
        buffer = buffer.pin_memory()
    on_device = buffer.to(device, non_blocking=True)
    return list(torch.split(on_device, [len(array) for array in arrays]))
