"""The rows of a snapshot: each document with its answers to all tasks.

Entry point: `aligned_batches`. A shard's documents file and label files have their rows in the same
order, so their columns are put together without a join, after a check of their ids. Each file must
have the hash that the snapshot published: its etag may differ, because the output may be a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, reduce

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import StorageError
from pipeline.ledger.columns import answers_type, structs
from pipeline.ledger.label_files import read_file, remedy
from pipeline.ledger.snapshot_files import NamedFile, NamedShard
from pipeline.ledger.snapshots import Contents
from pipeline.sources.documents import SKIPPED
from pipeline.stores.store import Store

DOCUMENT_SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("path", pa.string()),
        ("row", pa.int64()),  # in the input object, from 0
        ("content_hash", pa.string()),
        ("n_chars", pa.int64()),
        ("status", pa.string()),  # of reading; each task has its own status of labelling
    ]
)
# The text, where rows are joined with it. No task has a name that begins with an underscore.
TEXT_COLUMN = "_text"
# The shards that are read ahead. They hide the store's latency and take memory.
READ_AHEAD = 4


def wide_schema(snapshot: Contents, tasks: Sequence[str]) -> pa.Schema:
    """The columns of every document, then a struct for each task."""
    named = ((task, snapshot.tasks[task]) for task in tasks)
    fields = (pa.field(task, answers_type(t.columns, t.labels)) for task, t in named)
    return pa.schema([*DOCUMENT_SCHEMA, *fields])


def asked_rows(snapshot: Contents, rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows about which a task of them was asked, of a snapshot of a slice; else all rows."""
    statuses = [
        pc.struct_field(column, "status")
        for name, column in zip(rows.schema.names, rows.columns, strict=True)
        if name in snapshot.tasks
    ]
    if snapshot.slice is None or not statuses:
        return rows
    return rows.filter(reduce(pc.or_, (pc.not_equal(status, SKIPPED) for status in statuses)))


def aligned_batches(
    store: Store, snapshot: Contents, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The snapshot's rows, one batch per shard; the next shards are read at the same time."""
    tasks = [name for name in schema.names if name not in DOCUMENT_SCHEMA.names]
    read = partial(read_shard, store, schema=schema, tasks=tasks)
    reading: deque[Future[pa.RecordBatch]] = deque()
    pool = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="labels")
    try:
        for shard in snapshot.shards:
            reading.append(pool.submit(read, shard))
            if len(reading) > READ_AHEAD:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def read_shard(
    store: Store, shard: NamedShard, *, schema: pa.Schema, tasks: Sequence[str]
) -> pa.RecordBatch:
    """One shard's rows with the columns of the schema, of which `tasks` are tasks."""
    documents = read_documents_file(store, shard)
    stored = structs(documents).flatten()
    columns: dict[str, pa.Array] = dict(zip(documents.column_names, stored, strict=True))
    if "path" in schema.names:
        columns["path"] = pa.repeat(pa.scalar(shard.path), shard.rows)
    for task in tasks:
        struct = schema.field(task).type
        columns[task] = _answers(store, shard.labels[task], columns["doc_id"], struct)
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def read_documents_file(store: Store, shard: NamedShard) -> pa.Table:
    """The shard's documents, with their `row` in the input object."""
    rows = pa.array(range(shard.start_row, shard.end_row), pa.int64())
    return _read_whole(store, shard.documents, None).append_column("row", rows)


def _answers(
    store: Store, file: NamedFile, doc_ids: pa.Array, struct: pa.StructType
) -> pa.StructArray:
    """A label file's rows as structs; StorageError unless they are of these documents in order."""
    table = _read_whole(store, file, ["doc_id", *(field.name for field in struct)])
    answers = structs(table.drop_columns(["doc_id"]))
    if not table.column("doc_id").combine_chunks().equals(doc_ids):
        raise StorageError(
            f"{store.url}/{file.key}: its doc_id are not those of the shard's documents file in "
            f"order, so answers would go to other documents; `assay verify` reports more"
        )
    if answers.type != struct:
        stored = f"has {answers.type} where {struct} was published"
        raise StorageError(f"{store.url}/{file.key}: {stored}")
    return answers


def _read_whole(store: Store, file: NamedFile, columns: Sequence[str] | None) -> pa.Table:
    table = read_file(store, file.key, columns, published=file.hash)
    if table.num_rows != file.rows:
        raise StorageError(
            f"{store.url}/{file.key}: has {table.num_rows} rows where {file.rows} were published; "
            f"{remedy(file.key)}"
        )
    return table
