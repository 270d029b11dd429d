"""Conditions that choose documents: `--sample`, `--where`, and the `when` of tasks.

Entry points: `inside` for a slice, `accepted` for any condition, `input_columns` for the columns of
a shard's rows that one names, and `check_where` before a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from pipeline.sources.shards import Shard, Slice
from pipeline.sources.source import read_rows
from pipeline.sources.streams import Options, reading
from pipeline.sources.tables import TABLES, opened_table

PLACE = Option("where")

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


def inside(
    shard: Shard, part: Slice | None, content_hashes: pa.ChunkedArray, options: Options
) -> tuple[Bools, int]:
    """[docs]: which documents of the shard are in the slice, and on how many it is not known.

    A document that cannot be read has the hash of the empty text. A row whose columns cannot be
    read does not satisfy the condition.
    """
    chosen, failed = np.ones(shard.rows, np.bool_), 0
    if part is not None and part.sample is not None:
        is_chosen = pc.less(content_hashes, part.hash_limit)
        chosen &= np.asarray(is_chosen.to_numpy(zero_copy_only=False), np.bool_)
    if part is not None and part.where is not None:
        names = names_in(part.where, place=PLACE)
        values = input_columns(shard, names, options)
        if values.num_columns < len(names):
            return np.zeros(shard.rows, np.bool_), shard.rows
        met, failed = _met(part.where, values)
        chosen[: len(met)] &= met
        chosen[len(met) :] = False
    return chosen, failed


def check_where(where: str, shards: Sequence[Shard], options: Options) -> None:
    """SpecError unless the condition can be evaluated on the first rows of the input.

    At least one of the first rows must have each column that it names, and the condition must be
    computable on at least one of them.
    """
    names = names_in(where, place=PLACE)
    if not names:
        fix = "names no column of the input, so it chooses all documents or none; name one"
        raise SpecError([Problem(PLACE, fix, where)])
    parts = first_values(shards, names, options)
    whole = [part for part in parts if part.num_columns == len(names)]
    if parts and all(_met(where, part)[1] == part.num_rows for part in whole):
        place = Option("where", part=f", on {shards[0].path}")
        if lacking := [name for name in names if name not in parts[0].column_names]:
            raise SpecError([Problem(place, f'"{lacking[0]}" not found in the columns', where)])
        rule = Rule(where, parts[0].schema, place=place)
        for batch in parts[0].to_batches():
            rule.check_on(batch)
    check_values(whole, where, shards, PLACE)


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
    for name in parts[0].column_names if parts else ():
        if all(part.column(name).null_count == part.num_rows for part in parts):
            fix = f"the first {rows} rows of {shards[0].path} have no value in {name}"
            raise SpecError([Problem(place, f"{fix}; name a column of the input", sql)])


def input_columns(
    shard: Shard, names: Sequence[str], options: Options, count: int | None = None
) -> pa.Table:
    """These columns of the shard's rows, or of its first `count`; rows at its end may be missing.

    A table without one of the columns does not have it. In a format without a schema, a column is
    of the type that its values share, or of strings.
    """
    count = shard.rows if count is None else count
    if shard.version.format not in TABLES:
        return _values(shard, names, options, count)
    with reading(shard.path), opened_table(shard, options) as table:
        present = [name for name in names if name in table.schema.names]
        schema = pa.schema([table.schema.field(name) for name in present])
        batches, rows = [], 0
        for batch in table.batches(present) if present else ():
            batches.append(batch.select(present))
            rows += batch.num_rows
            if rows >= count:
                break
        return pa.Table.from_batches(batches, schema).slice(0, count)


def _met(where: str, values: pa.Table) -> tuple[Bools, int]:
    """Which of the rows satisfy the condition, and on how many it cannot be computed."""
    columns = {name: values.column(name).combine_chunks() for name in values.column_names}
    return accepted(where, columns, place=PLACE)


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
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([None if value is None else id_text(value) for value in values])
