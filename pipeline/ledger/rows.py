"""The rows of a snapshot: each document with its answers to all tasks.

Entry point: `aligned_batches`. A shard's documents file and label files have their rows in the same
order, so their columns are put together without a join, after a check of their ids. Each file must
have the hash that the snapshot published: its etag may differ, because the output may be a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import reduce

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
INPUT = "doc"  # the column of the input's columns, which are strings; no task has this name
# What is read ahead: files hide the store's latency, and the rows of their shards take memory.
FILES_AHEAD = 32
ROWS_AHEAD = 500_000


def wide_schema(snapshot: Contents, tasks: Sequence[str]) -> pa.Schema:
    """The columns of every document, then a struct for each task."""
    named = ((task, snapshot.tasks[task]) for task in tasks)
    fields = (pa.field(task, answers_type(t.columns, t.labels)) for task, t in named)
    return pa.schema([*DOCUMENT_SCHEMA, *fields])


def asked_rows(snapshot: Contents, rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows that a task was asked about, if the run had a condition; otherwise all rows."""
    statuses = [
        pc.struct_field(column, "status")
        for name, column in zip(rows.schema.names, rows.columns, strict=True)
        if name in snapshot.tasks
    ]
    if snapshot.limit is None or not statuses:
        return rows
    return rows.filter(reduce(pc.or_, (pc.not_equal(status, SKIPPED) for status in statuses)))


def aligned_batches(
    store: Store, snapshot: Contents, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The snapshot's rows, one batch per shard, in order.

    The files of the next shards are read meanwhile: `FILES_AHEAD` at once, or those of `ROWS_AHEAD`
    rows if these are fewer.
    """
    tasks = [name for name in schema.names if name not in DOCUMENT_SCHEMA.names]
    reading: deque[tuple[int, Callable[[], pa.RecordBatch]]] = deque()
    rows = 0
    pool = ThreadPoolExecutor(FILES_AHEAD, thread_name_prefix="labels")
    try:
        for shard in snapshot.shards:
            reading.append((shard.rows, _begin(pool, store, shard, schema, tasks)))
            rows += shard.rows
            while len(reading) * (1 + len(tasks)) > FILES_AHEAD or rows > ROWS_AHEAD:
                of_shard, result = reading.popleft()
                yield result()
                rows -= of_shard
        for _, result in reading:
            yield result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def read_shard(
    store: Store, shard: NamedShard, *, schema: pa.Schema, tasks: Sequence[str]
) -> pa.RecordBatch:
    """One shard's rows with the columns of the schema, of which `tasks` are tasks."""
    with ThreadPoolExecutor(1 + len(tasks), thread_name_prefix="labels") as pool:
        return _begin(pool, store, shard, schema, tasks)()


def _begin(
    pool: Executor, store: Store, shard: NamedShard, schema: pa.Schema, tasks: Sequence[str]
) -> Callable[[], pa.RecordBatch]:
    """Starts to read a shard's files, all at once; returns a function that waits for its rows."""
    documents = pool.submit(read_documents_file, store, shard)
    answers = {
        task: pool.submit(_answers, store, shard, task, schema.field(task).type) for task in tasks
    }

    def result() -> pa.RecordBatch:
        stored = documents.result()
        columns = {name: stored.column(name).combine_chunks() for name in stored.column_names}
        columns["path"] = pa.repeat(pa.scalar(shard.path), shard.rows)
        for task, reading in answers.items():
            doc_ids, columns[task] = reading.result()
            if not doc_ids.equals(columns["doc_id"]):
                raise StorageError(
                    f"{store.url}/{shard.labels[task].key}: its doc_id are not those of the "
                    f"shard's documents file in order, so answers would go to other documents; "
                    f"`assay verify` reports more"
                )
        return pa.record_batch([columns[name] for name in schema.names], schema=schema)

    return result


def read_documents_file(store: Store, shard: NamedShard) -> pa.Table:
    """The shard's documents, with their `row` in the input object."""
    stored = _read_whole(store, shard.documents, shard.rows, None)
    rows = pa.array(range(shard.start_row, shard.end_row), pa.int64())
    documents = pa.Table.from_struct_array(structs(stored))
    return documents.append_column("row", rows)


def _answers(
    store: Store, shard: NamedShard, task: str, struct: pa.StructType
) -> tuple[pa.StringArray, pa.StructArray]:
    """The ids of a label file's documents, and its rows as structs of this type."""
    file, columns = shard.labels[task], ["doc_id", *(field.name for field in struct)]
    table = _read_whole(store, file, shard.rows, columns)
    answers = structs(table.drop_columns(["doc_id"]))
    if answers.type != struct:
        stored = f"has {answers.type} where {struct} was published"
        raise StorageError(f"{store.url}/{file.key}: {stored}")
    return table.column("doc_id").combine_chunks(), answers


def _read_whole(
    store: Store, file: NamedFile, rows: int, columns: Sequence[str] | None
) -> pa.Table:
    table = read_file(store, file.key, columns, published=file.hash)
    if table.num_rows != rows:
        raise StorageError(
            f"{store.url}/{file.key}: has {table.num_rows} rows where {rows} were published; "
            f"{remedy(file.key)}"
        )
    return table
