"""The kept rows of a shard, as a file.

Entry point: `kept_rows`. Parquet keeps its schema and codecs.
JSON lines, CSV and TSV keep their format, their codec and the bytes of each row; CSV and TSV also
the header. Rows of Arrow files become Parquet. Rows of other formats become JSON lines with a key
for each column: `text`, `id`, `url` and `date` of WET files, `text` and `id` of text files.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, compress, islice
from typing import IO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.errors import StorageError, UnreadableError, one_line
from pipeline.sources.delimited import header_of
from pipeline.sources.documents import RawRow, TooLong, read_text, too_long
from pipeline.sources.formats import READERS, reader_of
from pipeline.sources.records import file_segments, shard_records, units_of
from pipeline.sources.shards import Shard
from pipeline.sources.streams import CODECS, Options, Stream, opened, reading
from pipeline.sources.tables import TABLES, opened_table
from pipeline.sources.webdataset import piece_samples, samples

Keep = NDArray[np.bool_]  # [rows of the shard]

# A row group is written when this much is gathered: the text of a shard fits, and the other columns
# of wide rows are not all held at once.
ROW_GROUP_BYTES = 128 * 1024 * 1024


def kept_rows(shard: Shard, options: Options, keep: Keep) -> bytes:
    """A file of the kept rows, read back; StorageError where the file does not hold them.

    Rows that are not kept need not be readable.
    """
    assert len(keep) == shard.rows, (len(keep), shard.rows)
    format = shard.version.format
    try:
        with reading(shard.path):
            if format in TABLES:
                data = _kept_table(shard, options, keep)
                # — not `read_table`, which refuses two columns of one name
                with pq.ParquetFile(pa.BufferReader(data)) as parquet:
                    written = parquet.read(use_threads=False).num_rows
            else:
                parts_of, rows_in = _TEXTS.get(format.partition(".")[0], _OBJECTS)
                codec = CODECS.get((format + CONVERTED.get(format, "")).rpartition(".")[2])
                data = _joined(parts_of(shard, options, keep), codec)
                written = 0
                if data:
                    with pa.input_stream(pa.py_buffer(data), compression=codec) as stream:
                        written = rows_in(stream, shard.version.quoted)
    except UnreadableError as error:
        raise _cannot_keep(shard, keep, one_line(error.__cause__ or error)) from error
    if written != keep.sum():
        raise _cannot_keep(shard, keep, f"the copy holds {written}")
    return data


def _cannot_keep(shard: Shard, keep: Keep, reason: str) -> StorageError:
    return StorageError(
        f"{shard.path}: {keep.sum()} rows from row {shard.piece.start_row} are to be kept and "
        f"cannot be copied: {reason}; repair the file and label it again, or drop what cannot be "
        f"read (filter.on_error: drop)"
    )


def _end(keep: Keep) -> int:
    """The number of rows up to the last kept one; those after it need not be readable."""
    return int(np.flatnonzero(keep)[-1]) + 1 if keep.any() else 0


def _kept_lines(shard: Shard, options: Options, keep: Keep) -> Iterator[bytes]:
    """The exact lines, each with its newline; the last line of the file gets one."""
    for line in _kept(shard_records(shard, options), keep):
        yield line if line.endswith(b"\n") else line + b"\n"


def _kept_records(shard: Shard, options: Options, keep: Keep) -> Iterator[bytes]:
    """The header and the exact records, each with its newline; the last of the file gets one."""
    header = header_of(shard.version, options)
    for record in chain([header], _kept(shard_records(shard, options), keep)):
        yield record if record.endswith((b"\n", b"\r")) else record + b"\n"


def _kept(records: Iterable[bytes | TooLong], keep: Keep) -> Iterator[bytes]:
    for record in compress(islice(records, _end(keep)), keep):
        if isinstance(record, TooLong):
            raise OSError(f"a row is {too_long()}")
        yield record


def _rows_as_lines(shard: Shard, options: Options, keep: Keep) -> Iterator[bytes]:
    """The rows as JSON lines; the key `text` comes before the others."""
    rows = reader_of(shard.version.format).rows(shard, options, None)
    for row in compress(islice(rows, _end(keep)), keep):
        if row.problem is not None:
            raise OSError(f"a row is not readable: {row.problem}")
        values = dict(row.values)
        for name in sorted(values, key=lambda name: name != "text"):
            value = values.pop(name)
            if isinstance(value, bytes | TooLong):
                value, _, problem = read_text(RawRow(value))
                if problem is not None:
                    place = f"the {name} of record {row.values.get('id')}"
                    raise OSError(f"{place} is not readable: {problem}")
            values[name] = value
        yield json.dumps(values, ensure_ascii=False).encode() + b"\n"


def _kept_samples(shard: Shard, options: Options, keep: Keep) -> Iterator[bytes]:
    """The exact members of the kept rows, and the end of the archive."""
    units = islice(piece_samples(shard, options), _end(keep))
    with opened(shard.path, options) as file:
        for sample in compress(units, keep):
            file.seek(sample.start_byte)
            yield file.read(sample.end_byte - sample.start_byte)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _samples_in(stream: Stream, _: bool | None) -> int:
    with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r:") as archive:
        return sum(1 for _ in samples(archive))


def _records_in(stream: Stream, quoted: bool | None, *, format: str) -> int:
    return sum(1 for _ in units_of(file_segments(stream, format, quoted)))


# By the first part of a format: the parts of a file of the kept rows, and its number of rows.
_TEXTS: Mapping[
    str,
    tuple[Callable[[Shard, Options, Keep], Iterator[bytes]], Callable[[Stream, bool | None], int]],
] = {
    "jsonl": (_kept_lines, partial(_records_in, format="jsonl")),
    "csv": (_kept_records, lambda *stream: _records_in(*stream, format="csv") - 1),
    "tsv": (_kept_records, lambda *stream: _records_in(*stream, format="tsv") - 1),
    "ndjson": (_kept_lines, partial(_records_in, format="ndjson")),
    "json": (_kept_lines, partial(_records_in, format="json")),
    "tar": (_kept_samples, _samples_in),
}
# Of all other formats.
_OBJECTS = _rows_as_lines, partial(_records_in, format="jsonl")
# The formats that are not written as they are read, with what is added to the file's name.
CONVERTED = {
    format: ".parquet" if format in TABLES else ".jsonl.zst"
    for reader in READERS
    for format in reader.formats
    if format != "parquet" and format.partition(".")[0] not in _TEXTS
}


def _joined(lines: Iterable[bytes], codec: str | None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.output_stream(sink, compression=codec) as stream:
        stream.writelines(lines)
    return bytes(sink.getvalue())


def _kept_table(shard: Shard, options: Options, keep: Keep) -> bytes:
    """A Parquet file of the rows; each column of a Parquet file keeps its codec."""
    sink = pa.BufferOutputStream()
    with opened_table(shard, options) as table:
        codecs = table.codecs or "zstd"
        with pq.ParquetWriter(sink, table.schema, compression=codecs, version="2.6") as writer:
            for group in _row_groups(_kept_batches(table.batches(None), keep), table.schema):
                writer.write_table(group, row_group_size=max(1, group.num_rows))
    return bytes(sink.getvalue())


def _kept_batches(batches: Iterable[pa.RecordBatch], keep: Keep) -> Iterator[pa.RecordBatch]:
    end, position = _end(keep), 0
    if not end:
        return
    for batch in batches:
        mask = keep[position : position + batch.num_rows]
        if mask.any():
            yield _filtered(batch, mask)
        position += batch.num_rows
        if position >= end:
            return


def _filtered(batch: pa.RecordBatch, mask: Keep) -> pa.RecordBatch:
    try:
        return batch.filter(pa.array(mask))
    except pa.ArrowNotImplementedError:  # — of string views, as Polars writes them
        runs = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
        return pa.concat_batches([batch.slice(start, end - start) for start, end in runs])


def _row_groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """The batches joined, each time that there is enough for a row group."""
    held: list[pa.RecordBatch] = []
    size_bytes = 0
    for batch in batches:
        held.append(batch)
        size_bytes += batch.nbytes
        if size_bytes >= ROW_GROUP_BYTES:
            yield pa.Table.from_batches(held, schema)
            held, size_bytes = [], 0
    if held:
        yield pa.Table.from_batches(held, schema)
