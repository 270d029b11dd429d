"""What holds for rows whose answers are ranked: the likeliest labels, the levels of the best.

Knows the columns `top` and `levels`. Knows nothing of the other columns, of files or of stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.data.commit import P_SUM_TOLERANCE

Rows = NDArray[np.bool_]  # [docs]: those that break a rule
# One subtraction of float32 numbers below 1 is off by less.
_TOLERANCE = 1e-6


def ranked_rules(table: pa.Table, labels: Sequence[str]) -> Iterator[tuple[str, Rows]]:
    """The rules of `top`, of a row that has one."""
    top = table.column("top").combine_chunks()
    docs, names, p = _flat(top)
    rows = len(top)
    unknown = ~_numpy(pc.is_in(names, value_set=pa.array(list(labels), pa.string())))
    yield "top has a label that was not published", _any(docs[unknown], rows)
    yield "top is not between 0 and 1", _any(docs[~((p > 0) & (p <= 1 + P_SUM_TOLERANCE))], rows)
    yield "top does not fall", _any(docs[1:][(docs[1:] == docs[:-1]) & ~(p[1:] <= p[:-1])], rows)
    sums = np.bincount(docs, weights=p, minlength=rows)
    yield "top sums to more than 1", sums > 1 + P_SUM_TOLERANCE
    counts = np.bincount(docs, minlength=rows)
    there = _numpy(top.is_valid())
    yield "top is empty", there & (counts == 0)
    first = np.concatenate([[0], np.cumsum(counts)])[:-1]
    answered = there & (counts > 0)
    best = np.array(_strings(table, "label"), dtype=object)
    leading = np.full(rows, None, dtype=object)
    leading[answered] = np.array(names.to_pylist(), dtype=object)[first[answered]]
    yield "label is not the first of top", answered & (best != leading)
    yield (
        "margin is not the first probability minus the second",
        _off_margin(table, p, first, counts, answered),
    )


def level_rules(table: pa.Table) -> Iterator[tuple[str, Rows]]:
    """The rules of `levels`, of a row that has them."""
    levels = table.column("levels").combine_chunks()
    docs, names, p = _flat(levels)
    rows = len(levels)
    labelled = _numpy(table.column("label").is_valid())
    yield "levels is there without a label, or not with one", _numpy(levels.is_valid()) != labelled
    yield "levels is not between 0 and 1", _any(docs[~((p >= 0) & (p <= 1))], rows)
    risen = (docs[1:] == docs[:-1]) & ~(p[1:] <= p[:-1] + P_SUM_TOLERANCE)
    yield "a level is likelier than what it lies below", _any(docs[1:][risen], rows)
    best = _strings(table, "label")
    beside = [
        not (best[d] or "").startswith(n) for d, n in zip(docs, names.to_pylist(), strict=True)
    ]
    yield "a level is not of the label's path", _any(docs[np.array(beside, dtype=bool)], rows)


def _off_margin(
    table: pa.Table,
    p: NDArray[np.float64],
    first: NDArray[np.integer],
    counts: NDArray[np.integer],
    answered: Rows,
) -> Rows:
    """Where one label is kept, the second is not known: the margin is at most the first."""
    margin = np.asarray(table.column("margin").to_numpy(zero_copy_only=False), dtype=np.float64)
    padded = np.concatenate([p, [0.0, 0.0]])
    known = padded[first] - np.where(counts > 1, padded[np.minimum(first + 1, len(p))], 0)
    off = ~(np.abs(margin - known) <= _TOLERANCE)
    above = ~((margin >= 0) & (margin <= padded[first] + _TOLERANCE))
    return np.asarray(answered & np.where(counts > 1, off, above), dtype=np.bool_)


def _flat(
    lists: pa.ListArray,
) -> tuple[NDArray[np.int64], pa.Array, NDArray[np.float64]]:
    """Each entry's row, its label and its probability."""
    docs = np.asarray(pc.list_parent_indices(lists).to_numpy(), dtype=np.int64)
    entries = lists.flatten()
    p = np.asarray(entries.field("p").to_numpy(zero_copy_only=False), dtype=np.float64)
    return docs, entries.field("label"), p


def _any(docs: NDArray[np.int64], rows: int) -> Rows:
    """The rows that are named."""
    found = np.zeros(rows, dtype=bool)
    found[docs] = True
    return found


def _strings(table: pa.Table, column: str) -> list[str | None]:
    strings: list[str | None] = table.column(column).cast(pa.string()).to_pylist()
    return strings


def _numpy(mask: pa.Array | pa.ChunkedArray) -> Rows:
    return np.asarray(mask.to_numpy(zero_copy_only=False), dtype=np.bool_)
