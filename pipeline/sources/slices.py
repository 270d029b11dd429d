"""Slices of the input: which documents of a shard `--sample` and `--where` choose.

Entry points: `SliceMask` while documents are read, and `check_where` before a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import Option, Problem, SpecError
from pipeline.sources.documents import TooLong
from pipeline.sources.id_text import id_text
from pipeline.sources.records import SAMPLE_ROWS
from pipeline.sources.rule import Rule, names_in
from pipeline.sources.shards import Shard
from pipeline.sources.source import read_documents, read_rows
from pipeline.sources.streams import Options, reading
from pipeline.sources.tables import TABLES, opened_table

PLACE = Option("where")


class SliceMask:
    """Which documents of one shard are in its slice. Without a slice, all of them are."""

    def __init__(self, shard: Shard, options: Options) -> None:
        self._slice = shard.slice
        self._where = None
        self.failed = 0  # rows on which the condition cannot be computed; they are outside
        if shard.slice is not None and shard.slice.where is not None:
            self._where, self.failed = _where_mask(shard, shard.slice.where, options)

    def inside(self, documents: pa.Table, start: int) -> NDArray[np.bool_]:  # [docs]
        """Which of the documents, from the shard's row `start` on, are in the slice.

        A document that cannot be read has the hash of the empty text. A row whose columns cannot
        be read does not satisfy the condition.
        """
        inside = np.ones(documents.num_rows, np.bool_)
        if self._slice is None:
            return inside
        if self._slice.sample is not None:
            chosen = pc.less(documents.column("content_hash"), self._slice.hash_limit)
            inside &= np.asarray(chosen.to_numpy(zero_copy_only=False), np.bool_)
        if self._where is not None:
            inside &= self._where[start : start + documents.num_rows]
        return inside


def read_inside(shard: Shard, options: Options) -> Iterator[pa.Table]:
    """The documents of a shard that are in its slice, a part at a time.

    They have the column `row`, the row in the input object.
    """
    mask, start = SliceMask(shard, options), 0
    for documents in read_documents(shard, options):
        first = shard.piece.start_row + start
        rows = pa.array(range(first, first + documents.num_rows), pa.int64())
        inside = pa.array(mask.inside(documents, start))
        start += documents.num_rows
        yield documents.append_column("row", rows).filter(inside)
        del documents  # the text of one part is freed before the next is read


def check_where(where: str, shards: Sequence[Shard], options: Options) -> None:
    """SpecError unless the condition can be evaluated on the first rows of the input.

    In formats without a schema, a column that a row does not have is null. At least one of the
    first rows must have it. The condition must be computable on at least one of them.
    """
    rows, failed, parts = 0, 0, []
    for shard in shards:
        count = min(shard.rows, SAMPLE_ROWS - rows)
        if count <= 0:
            break
        rows += count
        failed += _where_mask(shard, where, options, count)[1]
        if shard.version.format not in TABLES:
            parts.append(_values(shard, where, options, count))
    if rows and failed == rows:  # — a misspelt column, or a cast of all values
        _where_mask(shards[0], where, options, min(shards[0].rows, SAMPLE_ROWS), strict=True)
    for name in parts[0].column_names if parts else ():
        if all(part.column(name).null_count == part.num_rows for part in parts):
            fix = f"the first {rows} rows of {shards[0].path} have no value in {name}"
            raise SpecError([Problem(PLACE, f"{fix}; name a column of the input", where)])


def _where_mask(
    shard: Shard, where: str, options: Options, rows: int | None = None, *, strict: bool = False
) -> tuple[NDArray[np.bool_], int]:  # [rows]
    """Which rows of the shard satisfy the condition, and on how many it cannot be computed.

    With `rows`, of its first rows. With `strict`, SpecError where it cannot be computed.
    """
    count = shard.rows if rows is None else rows
    mask = np.zeros(count, np.bool_)  # — rows that cannot be read are outside
    position = failed = 0
    try:
        for rule, batch in _batches(shard, where, options, count):
            part = batch.slice(0, count - position)
            if strict:
                rule.check_on(part)
            met = rule.verdicts(part)
            if met.null_count:
                failed += rule.failures(part)
            accepted = pc.fill_null(met, False).to_numpy(zero_copy_only=False)
            mask[position : position + len(met)] = accepted
            position += len(met)
            if position >= count:
                break
    except SpecError:  # — of a file without a column, or with one of another type
        if strict:
            raise
        return np.zeros(count, np.bool_), count
    return mask, failed


def _batches(
    shard: Shard, where: str, options: Options, count: int
) -> Iterator[tuple[Rule, pa.RecordBatch]]:
    """The condition, bound to the columns of the shard, with the rows."""
    place = Option("where", part=f", on {shard.path}")
    if shard.version.format not in TABLES:
        values = _values(shard, where, options, count)
        rule = Rule(where, values.schema, place=place)
        yield from ((rule, batch) for batch in values.to_batches())
        return
    with reading(shard.path), opened_table(shard, options) as table:
        rule = Rule(where, table.schema, place=place)
        _require_columns(rule.columns, where)
        yield from ((rule, batch) for batch in table.batches(rule.columns))


def _values(shard: Shard, where: str, options: Options, count: int) -> pa.Table:
    """The condition's columns in the first rows of a shard whose format has no schema."""
    names = names_in(where, place=PLACE)
    _require_columns(names, where)
    columns: dict[str, list[object]] = {name: [] for name in names}
    for row in islice(read_rows(shard, options, names), count):
        for name, values in columns.items():
            value = None if row.problem is not None else row.values.get(name)
            values.append(None if isinstance(value, TooLong) else _decoded(value))
    return pa.table({name: _array(values) for name, values in columns.items()})


def _decoded(value: object) -> object:
    return id_text(value) if isinstance(value, bytes) else value


def _array(values: list[object]) -> pa.Array:
    """The values as a column of the type that they share, or as strings."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([None if value is None else id_text(value) for value in values])


def _require_columns(names: Sequence[str], where: str) -> None:
    if not names:
        fix = "names no column of the input, so it chooses all documents or none; name one"
        raise SpecError([Problem(PLACE, fix, where)])
