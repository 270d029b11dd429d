"""Arrow IPC input, as a file or as a stream: its pieces, and the rows of one piece.

Knows record batches. Knows nothing of shards' identity or of what becomes of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from pipeline.sources.columns import check_columns, rows_between
from pipeline.sources.documents import RawRow
from pipeline.sources.shards import Piece, Shard, Unit, cut_units
from pipeline.sources.streams import Options, opened

FILE_MAGIC = b"ARROW1"


@dataclass(frozen=True, slots=True)
class Batches:
    """An open object's schema and its record batches, read as they are asked for."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    is_file: bool  # with a footer; else it is a stream


def arrow_pieces(
    path: str, options: Options, *, text_column: str, id_column: str | None, target_bytes: int
) -> list[Piece]:
    """Record batches, joined or split. The batches are read: only they know their row counts."""
    with opened_batches(path, options) as arrow:
        check_columns(path, arrow.schema, text_column=text_column, id_column=id_column)
        units = (Unit(batch.num_rows, batch.column(text_column).nbytes) for batch in arrow.batches)
        return list(cut_units(units, target_bytes))


def arrow_rows(shard: Shard, options: Options) -> Iterator[RawRow]:
    """The shard's rows."""
    with opened_batches(shard.path, options) as arrow:
        yield from rows_between(
            arrow.batches,
            shard.piece.start_row,
            shard.piece.end_row,
            text_column=shard.version.text_column,
            id_column=shard.version.id_column,
        )


def arrow_schema(path: str, options: Options) -> pa.Schema:
    """The object's columns."""
    with opened_batches(path, options) as arrow:
        return arrow.schema


@contextmanager
def opened_batches(path: str, options: Options) -> Iterator[Batches]:
    """The object, open; whether it is a file or a stream is told by how it begins."""
    with opened(path, options) as file:
        is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
        file.seek(0)
        if not is_file:
            with pa.ipc.open_stream(file) as stream:
                yield Batches(stream.schema, iter(stream), is_file=False)
            return
        with pa.ipc.open_file(file) as reader:
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            yield Batches(reader.schema, batches, is_file=True)
