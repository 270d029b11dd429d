"""Arrow IPC input, a file or a stream: its pieces and its record batches.

Entry points: `arrow_pieces`, `opened_arrow`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from pipeline.sources.columns import Batches, batches_between, check_columns
from pipeline.sources.shards import Piece, Unit, cut_units
from pipeline.sources.streams import Options, opened

FILE_MAGIC = b"ARROW1"


def arrow_pieces(
    path: str, options: Options, *, text_column: str, id_column: str | None, target_bytes: int
) -> list[Piece]:
    """Record batches, joined or split. The batches are read: only they know their row counts."""
    with _opened_batches(path, options) as arrow:
        check_columns(path, arrow.schema, text_column=text_column, id_column=id_column)
        units = (Unit(batch.num_rows, batch.column(text_column).nbytes) for batch in arrow.batches)
        return list(cut_units(units, target_bytes))


@contextmanager
def opened_arrow(
    path: str, options: Options, piece: Piece, columns: Sequence[str] | None = None
) -> Iterator[Batches]:
    """The rows of the piece, with these columns (None: all), as their batches have them."""
    with _opened_batches(path, options) as arrow:
        within = batches_between(arrow.batches, piece.start_row, piece.end_row)
        chosen = within if columns is None else (batch.select(list(columns)) for batch in within)
        yield Batches(arrow.schema, chosen)


@contextmanager
def _opened_batches(path: str, options: Options) -> Iterator[Batches]:
    """All batches of the object. Its first bytes show whether it is a file or a stream."""
    with opened(path, options) as file:
        is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
        file.seek(0)
        if not is_file:
            with pa.ipc.open_stream(file) as stream:
                yield Batches(stream.schema, iter(stream))
            return
        with pa.ipc.open_file(file) as reader:
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            yield Batches(reader.schema, batches)
