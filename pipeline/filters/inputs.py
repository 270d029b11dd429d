"""Columns of the input, beside the answers of its rows.

Entry points: `doc_field` and `with_inputs` for the column that rules read, `input_values`, and
`check_columns_of` before the first shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import Problem, SpecError, listed
from pipeline.ledger.rows import INPUT
from pipeline.sources.delimited import columns_of
from pipeline.sources.documents import TooLong
from pipeline.sources.id_text import id_text
from pipeline.sources.shards import Shard
from pipeline.sources.source import read_rows
from pipeline.sources.streams import Options, reading
from pipeline.sources.tables import TABLES, opened_table

SAMPLE_ROWS = 100_000  # read of files without a header, until one has a value in the column
_HEADED = (*TABLES, "csv", "tsv")  # the formats whose files name their columns
FILES_AT_ONCE = 16


def doc_field(names: Sequence[str]) -> pa.Field:
    """The column of these columns of the input."""
    return pa.field(INPUT, pa.struct([(name, pa.string()) for name in names]))


def with_inputs(
    answers: pa.RecordBatch, shard: Shard, options: Options, names: Sequence[str]
) -> pa.RecordBatch:
    """The answers of a shard, with the column of `doc_field`."""
    rows = pc.subtract(answers.column("row"), shard.piece.start_row)
    columns = zip(*input_values(shard, names, options), strict=True)
    values = [pa.array(column, pa.string()).take(rows) for column in columns]
    struct = pa.StructArray.from_arrays(values, list(names))
    return answers.append_column(doc_field(names), struct)


def check_columns_of(
    shards: Sequence[Shard], options: Options, columns: Sequence[str], *, place: str
) -> None:
    """SpecError unless a file has each column; without a header, a value in one of its first rows.

    A row without the column counts as null, also in a table. In a file with a header, two columns
    of one name are an error.
    """
    if not columns or not shards:
        return
    headed = {shard.path: shard for shard in shards if shard.version.format.startswith(_HEADED)}
    check = partial(_check_file, options=options, columns=columns, place=place)
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        lacking = dict(zip(headed, pool.map(check, headed.values()), strict=True))
    for column in columns:
        having = [shard for shard in shards if column not in lacking.get(shard.path, ())]
        if not having:
            raise SpecError([Problem(place, lacking[shards[0].path][column], column)])
        if any(shard.path in headed for shard in having):
            continue
        values = chain.from_iterable(input_values(shard, [column], options) for shard in having)
        if all(value is None for [value] in islice(values, SAMPLE_ROWS)):
            fix = f"the first {SAMPLE_ROWS:,} rows from {having[0].path} on have no value there"
            raise SpecError([Problem(place, fix, column)])


def _check_file(
    shard: Shard, options: Options, columns: Sequence[str], place: str
) -> Mapping[str, str]:
    """The columns that a file lacks, each with the line of its error; SpecError for a wrong one."""
    kinds: Mapping[str, pa.DataType] = {}
    with reading(shard.path):
        if shard.version.format in TABLES:
            with opened_table(shard, options) as table:
                names, kinds = table.schema.names, {f.name: f.type for f in table.schema}
        else:
            names = columns_of(shard.version, options)
    has = f"it has: {listed(sorted(names))}"
    for column in columns:
        if (count := names.count(column)) > 1:
            fix = f"{shard.path} has {count} such columns; {has}"
            raise SpecError([Problem(place, fix, column)])
        if column in kinds and pa.types.is_nested(kinds[column]):
            fix = f"{shard.path} has {kinds[column]} there; name a column of strings or numbers"
            raise SpecError([Problem(place, fix, column)])
    lacks = f"{shard.path} has no such column; {has}"
    return {column: lacks for column in columns if column not in names}


def input_values(
    shard: Shard, columns: Sequence[str], options: Options
) -> Iterator[list[str | None]]:
    """The values of these columns in each row of a shard, as strings; None where there is none."""
    for row in read_rows(shard, options, columns):
        values = {} if row.problem is not None else row.values
        yield [_as_string(values.get(column)) for column in columns]


def _as_string(value: object) -> str | None:
    if value is None:
        return None
    return "too long" if isinstance(value, TooLong) else id_text(value)
