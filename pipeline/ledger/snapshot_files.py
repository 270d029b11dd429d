"""The files of a snapshot: a table with a row for each file, shard by shard.

Entry points: `files_of`, which makes the table of the current files, and `Shards`, which gives the
shards of such a table one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from pipeline.ledger.cells import Committed
from pipeline.ledger.keys import documents_key
from pipeline.sources.shards import Shard

# The shards of a row group of a table of files, and those that are Python objects at once.
GROUP_SHARDS = 10_000

# A row of the table is a file, and after these columns come its counts. The files of a shard follow
# one another: the documents file, whose task is null, and one of each task in their order.
PLACED = pa.schema(
    [
        *((name, pa.string()) for name in ("sid", "task", "key", "etag", "path")),
        *((name, pa.int64()) for name in ("rows", "start_row", "end_row")),
    ]
)


_PLACE = ("sid", "path", "start_row", "end_row", "rows")


class NamedFile(NamedTuple):
    """A file as a snapshot names it."""

    key: str
    hash: str | None = None  # None before it is published


@dataclass(frozen=True, slots=True)
class NamedShard:
    """A shard as a snapshot names it, with its files."""

    sid: str
    path: str
    start_row: int
    end_row: int
    rows: int
    documents: NamedFile
    labels: Mapping[str, NamedFile]  # by task


@dataclass(frozen=True, slots=True)
class Shards(Iterable[NamedShard]):
    """The shards of a table of files, in its order; a shard is an object while it is looked at."""

    files: pa.Table
    width: int  # the number of files of a shard

    def __len__(self) -> int:
        return int(self.files.num_rows) // self.width

    def __iter__(self) -> Iterator[NamedShard]:
        size = GROUP_SHARDS * self.width
        for start in range(0, self.files.num_rows, size):
            rows = self.files.slice(start, size).to_pylist()
            for at in range(0, len(rows), self.width):
                first, *labels = rows[at : at + self.width]
                by_task = {row["task"]: NamedFile(row["key"], row.get("hash")) for row in labels}
                place = {name: first[name] for name in _PLACE}
                documents = NamedFile(first["key"], first.get("hash"))
                yield NamedShard(**place, documents=documents, labels=by_task)


def files_of(shards: Sequence[Shard], tasks: Iterable[str], done: Committed) -> pa.Table:
    """The current files that these shards have, as a table without counts."""

    def files(shard: Shard) -> Iterator[tuple[str | None, str, str]]:
        if shard.id in done.documents:
            yield None, documents_key(shard.id), done.documents[shard.id]
        for task in tasks:
            if shard.id in done.labels[task]:
                yield task, done.label_key(task, shard.id), done.labels[task][shard.id]

    groups = [PLACED.empty_table()]
    for start in range(0, len(shards), GROUP_SHARDS):
        rows = [
            (shard.id, *file, shard.path, shard.rows, shard.piece.start_row, shard.piece.end_row)
            for shard in shards[start : start + GROUP_SHARDS]
            for file in files(shard)
        ]
        columns = zip(*rows, strict=True)
        arrays = [pa.array(values, of.type) for values, of in zip(columns, PLACED, strict=False)]
        groups += [pa.Table.from_arrays(arrays, schema=PLACED)] if rows else []
    return pa.concat_tables(groups)


def label_files_of(shards: Sequence[Shard], done: Committed) -> pa.Table:
    """The current label files that these shards have, as a table without counts."""
    files = files_of(shards, done.labels, done)
    return files.filter(files["task"].is_valid())
