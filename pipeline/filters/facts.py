"""What a filter reads from the input beside the answers: the sizes, texts and groups of documents.

Entry points: `read_facts` for one shard, `check_columns_of` before the first shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.errors import Problem, SpecError, StorageError
from pipeline.hashes import short_hash
from pipeline.sources.documents import RawRow, TooLong, id_text, read_text
from pipeline.sources.shards import Shard
from pipeline.sources.source import TABLES, every_row, opened_table
from pipeline.sources.streams import Options, reading

SAMPLE_ROWS = 100
NO_VALUE = "null"
FILES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Facts:
    """What the input says about a shard's documents, in order."""

    text_bytes: list[int]  # [docs]
    dropped_texts: pa.Array  # of documents that are not kept; null where a row has no text
    groups: dict[str, list[str]]  # by column: [docs]


def read_facts(
    shard: Shard,
    options: Options,
    columns: Sequence[str],
    *,
    hashes: pa.Array,  # [docs]: of the texts that were labelled
    keep: NDArray[np.bool_],  # [docs]
) -> Facts:
    """The facts of a shard; StorageError if a document is not the one that was labelled."""
    sizes: list[int] = []
    texts: list[str | None] = []
    # — read with the id column, as for labelling: a damaged id page made these rows unreadable too
    for index, row in enumerate(every_row(shard, options)):
        _, encoded, problem = read_text(row)
        if short_hash(encoded) != hashes[index].as_py():
            raise StorageError(
                f"{shard.path}: row {shard.piece.start_row + index} is not the text that was "
                f"labelled; run `assay run` to label the file as it is now"
            )
        sizes.append(len(encoded))
        if not keep[index]:
            texts.append(None if problem is not None else encoded.decode())
    groups = {
        column: [_value(row) for row in every_row(_with_group(shard, column), options)]
        for column in columns
    }
    return Facts(sizes, pa.array(texts, pa.large_string()), groups)


def check_columns_of(shards: Sequence[Shard], options: Options, columns: Sequence[str]) -> None:
    """SpecError unless every table has the columns, and the first rows have a value in each.

    Rows of other formats need not have the same columns: a row without the column counts as null.
    """
    if not columns or not shards:
        return
    tables = {shard.path: shard for shard in shards if shard.version.format in TABLES}
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        list(pool.map(lambda shard: _check_table(shard, options, columns), tables.values()))
    for column in columns:
        rows = islice(every_row(_with_group(shards[0], column), options), SAMPLE_ROWS)
        if all(row.problem is not None or row.id is None for row in rows):
            fix = f"the first {SAMPLE_ROWS} rows of {shards[0].path} have no value in this column"
            raise SpecError([Problem("--by", fix, column)])


def _check_table(shard: Shard, options: Options, columns: Sequence[str]) -> None:
    with reading(shard.path), opened_table(shard, options) as table:
        schema = table.schema
    for column in columns:
        count = schema.names.count(column)
        if count != 1:
            names = ", ".join(sorted(schema.names))
            fix = f"{shard.path} has {count or 'no'} such column; it has: {names}"
            raise SpecError([Problem("--by", fix, column)])
        kind = schema.field(column).type
        if pa.types.is_nested(kind):
            fix = f"{shard.path} has {kind} there; name a column of strings or numbers"
            raise SpecError([Problem("--by", fix, column)])


def _with_group(shard: Shard, column: str) -> Shard:
    """The shard with this column in place of its id column, which is what readers return."""
    return replace(shard, version=replace(shard.version, id_column=column))


def _value(row: RawRow) -> str:
    # — a row that cannot be read has its place in the file as its id, not a value of the column
    if row.problem is not None or row.id is None:
        return NO_VALUE
    return "too long" if isinstance(row.id, TooLong) else id_text(row.id)
