"""Conditions that choose documents, and the columns of the input that they name.

Entry points: `accepted`, `input_columns` for the columns of a shard's rows, and `first_values` for
those of the first rows, before a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import Problem, SpecError, UnreadableError
from pipeline.sources.documents import TooLong
from pipeline.sources.id_text import id_text
from pipeline.sources.records import SAMPLE_ROWS
from pipeline.sources.rule import Rule
from pipeline.sources.shards import Shard
from pipeline.sources.source import check_unchanged, read_rows
from pipeline.sources.streams import Options, reading
from pipeline.sources.tables import TABLES, opened_table

Bools = NDArray[np.bool_]


def accepted(sql: str, columns: Mapping[str, pa.Array], *, place: str) -> tuple[Bools, int]:
    """[docs]: which documents a condition accepts, and on how many it cannot be computed.

    Null means no, and so does a value that cannot be computed, or a column of another type.

    Args:
        sql: A boolean SQL expression.
        columns: The columns that it may name, [docs] each.
        place: The key or the option of the condition.
    """
    rows = pa.record_batch(list(columns.values()), names=list(columns))
    try:
        rule = Rule(sql, rows.schema, place=place)
    except SpecError:  # — of a file without a column, or with one of another type
        return np.zeros(rows.num_rows, np.bool_), rows.num_rows
    met = rule.verdicts(rows)
    failed = rule.failures(rows) if met.null_count else 0
    return np.array(pc.fill_null(met, False).to_numpy(zero_copy_only=False), np.bool_), failed


def first_values(shards: Iterable[Shard], names: Sequence[str], options: Options) -> list[pa.Table]:
    """These columns (`input_columns`) in the first rows of the input, shard by shard."""
    parts, rows = list[pa.Table](), 0
    for shard in shards:
        if (count := min(shard.rows, SAMPLE_ROWS - rows)) <= 0:
            break
        rows += count
        parts.append(input_columns(shard, names, options, count))
    return parts


def check_values(parts: Sequence[pa.Table], sql: str, shards: Sequence[Shard], place: str) -> None:
    """SpecError if a column that a condition names has no value in any of these rows."""
    rows = sum(part.num_rows for part in parts)
    for name in parts[0].column_names if rows else ():
        if all(part.column(name).null_count == part.num_rows for part in parts):
            fix = f"the first {rows} rows of {shards[0].path} have no value in {name}"
            raise SpecError([Problem(place, f"{fix}; name a column of the input", sql)])


def input_columns(
    shard: Shard, names: Sequence[str], options: Options, count: int | None = None
) -> pa.Table:
    """These columns of the shard's rows, or of its first `count`.

    Rows at its end may be missing: those from a place on that cannot be read. A table without one
    of the columns does not have it. In a format without a schema, a column is of the type that its
    values share, or of strings.

    Raises:
        StorageError: The object is not the version that was cut.
        SpecError: A table has two columns of one name.
    """
    count = shard.rows if count is None else count
    if shard.version.format not in TABLES:
        return _values(shard, names, options, count)
    schema, batches, rows = pa.schema([]), list[pa.RecordBatch](), 0
    try:
        with reading(shard.path), opened_table(shard, options) as table:
            present = [name for name in names if name in table.schema.names]
            if twins := [name for name in present if table.schema.names.count(name) > 1]:
                fix = f"{shard.path} has several columns of this name; rename all but one"
                raise SpecError([Problem("input.path", fix, twins[0])])
            schema = pa.schema([table.schema.field(name) for name in present])
            for batch in table.batches(present) if present else ():
                batches.append(batch.select(present))
                rows += batch.num_rows
                if rows >= count:
                    break
    except UnreadableError:  # — the other columns may be whole
        check_unchanged(shard, options)
    return pa.Table.from_batches(batches, schema).slice(0, count)


def _values(shard: Shard, names: Sequence[str], options: Options, count: int) -> pa.Table:
    """The columns in the first rows of a shard whose format has no schema."""
    columns: dict[str, list[object]] = {name: [] for name in names}
    for row in islice(read_rows(shard, options, list(names)), count):
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
    except (pa.ArrowException, OverflowError, UnicodeError):  # JSON has any integer, half a pair
        return pa.array([None if value is None else id_text(value) for value in values])
