"""What a filter has to know of a shard's documents beside their answers: sizes, texts and groups.

Knows input rows, and that they must be the ones that were labelled. Knows nothing of rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.data.documents import RawRow, read_text, written
from pipeline.data.hashes import short_hash
from pipeline.data.row_limits import TooLong
from pipeline.data.shards import Shard
from pipeline.data.source import every_row
from pipeline.data.streams import Options, reading
from pipeline.errors import AssayError, Problem, SpecError, StorageError

SAMPLE_ROWS = 100
NO_VALUE = "null"


@dataclass(frozen=True, slots=True)
class Facts:
    """Of a shard's documents, in order."""

    text_bytes: list[int]  # [docs]
    dropped_texts: pa.Array  # of those that are not kept; null where there is none
    groups: dict[str, list[str]]  # by column: [docs]


def read_facts(
    shard: Shard,
    options: Options,
    columns: Sequence[str],
    *,
    hashes: pa.Array,  # [docs]: of the texts that were labelled
    keep: NDArray[np.bool_],  # [docs]
) -> Facts:
    """The facts; StorageError if a document is not the one that was labelled."""
    sizes: list[int] = []
    texts: list[str | None] = []
    first: list[str] = []  # the first column's values: they come with the texts
    rows = every_row(_with(shard, columns[0] if columns else None), options)
    for index, row in enumerate(rows):
        _, encoded, problem = read_text(row)
        if short_hash(encoded) != hashes[index].as_py():
            raise StorageError(
                f"{shard.path}: row {shard.piece.start_row + index} is not the text that was "
                f"labelled; run `assay run` to label the file as it is now"
            )
        sizes.append(len(encoded))
        first.append(_value(row))
        if not keep[index]:
            texts.append(None if problem is not None else encoded.decode())
    groups = {columns[0]: first} if columns else {}
    for column in columns[1:]:
        groups[column] = [_value(row) for row in every_row(_with(shard, column), options)]
    return Facts(sizes, pa.array(texts, pa.large_string()), groups)


def check_columns_of(shard: Shard, options: Options, columns: Sequence[str]) -> None:
    """SpecError unless the shard's first rows have each of the columns, with a value."""
    for column in columns:
        fix = (
            f"{shard.path} has no such column of strings or numbers with a value in its first rows"
        )
        try:
            with reading(shard.path):
                rows = list(islice(_rows(shard, column, options), SAMPLE_ROWS))
        except (KeyError, ValueError, AssayError) as error:
            raise SpecError([Problem("--by", fix, column)]) from error
        if all(row.id is None for row in rows):
            raise SpecError([Problem("--by", fix, column)])


def _rows(shard: Shard, column: str, options: Options) -> Iterator[RawRow]:
    return (row for row in every_row(_with(shard, column), options) if row.problem is None)


def _with(shard: Shard, column: str | None) -> Shard:
    """The shard, with what is wanted beside the text: the readers call it the id."""
    return replace(shard, version=replace(shard.version, id_column=column))


def _value(row: RawRow) -> str:
    if row.id is None:
        return NO_VALUE
    return "too long" if isinstance(row.id, TooLong) else written(row.id)
