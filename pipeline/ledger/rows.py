"""The rows of a snapshot: each document with its answers to all tasks.

Entry point: `aligned_batches`. A shard's documents file and label files have their rows in the same
order, so their columns are put together without a join, after a check of their ids.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import StorageError
from pipeline.ledger.columns import ROW, answers_type, structs
from pipeline.ledger.keys import is_part, listing_prefix
from pipeline.ledger.label_files import read_file
from pipeline.ledger.snapshots import Contents, NamedFile, NamedShard
from pipeline.stores.local import ETAG as LOCAL_ETAG
from pipeline.stores.store import Store, StoredObject

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
MISSING = "does not exist"  # a file that a snapshot names


def wide_schema(snapshot: Contents, tasks: Sequence[str]) -> pa.Schema:
    """The columns of every document, then a struct for each task."""
    named = ((task, snapshot.tasks[task]) for task in tasks)
    fields = (pa.field(task, answers_type(t.columns, t.labels)) for task, t in named)
    return pa.schema([*DOCUMENT_SCHEMA, *fields])


def aligned_batches(
    store: Store, snapshot: Contents, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The snapshot's rows, one batch per shard; the next shards are read at the same time."""
    tasks = [name for name in schema.names if name not in DOCUMENT_SCHEMA.names]
    read = partial(read_shard, store, schema=schema, tasks=tasks)
    refuse_changed(store, snapshot, tasks)
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


def refuse_changed(store: Store, snapshot: Contents, tasks: Collection[str]) -> None:
    """StorageError unless the files of these tasks are the published ones."""
    files = [file for file in snapshot.files if file.task is None or file.task in tasks]
    for key, change in changed_files(store, files).items():
        raise StorageError(
            f"{store.url}/{key}: {change} (snapshot {snapshot.number}); restore it with its file "
            f"time, or run again; `assay verify` lists all such files"
        )


def changed_files(store: Store, files: Collection[NamedFile]) -> dict[str, str]:
    """By key, how each file that is not the published one differs: one LIST for each folder.

    A file with another etag may be a copy, made with other tools or in another store. It is the
    same file if its MD5 hash is the published etag, as object stores give it. A local etag has the
    size and the time: if no file has its etag, all were copied, and their sizes are compared.
    """
    folders = {listing_prefix(file.key) for file in files}
    now = {item.key: item for folder in sorted(folders) for item in store.list(folder)}
    other = [file for file in files if file.key not in now or now[file.key].etag != file.etag]
    all_copied = len(other) == len(files)
    changes = {}
    for file in other:
        if file.key not in now:
            changes[file.key] = MISSING
        elif not _is_copy(store, file, now[file.key], all_copied=all_copied):
            etag = now[file.key].etag
            change = f"has the etag {etag} and was published with {file.etag}: it is another file"
            changes[file.key] = change
    return changes


def _is_copy(store: Store, file: NamedFile, now: StoredObject, *, all_copied: bool) -> bool:
    if size := LOCAL_ETAG.fullmatch(file.etag):
        return all_copied and int(size[1], 16) == now.size_bytes
    md5 = hashlib.md5(store.read(file.key), usedforsecurity=False)
    return file.etag in (md5.hexdigest(), b64encode(md5.digest()).decode())


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
    """The shard's documents that the snapshot shows, with their `row` in the input object."""
    documents = _read_whole(store, shard.documents, None)
    if ROW in documents.column_names:  # of a slice, as earlier versions wrote it
        return documents
    labels = next(iter(shard.labels.values()))
    if not is_part(labels.key):
        rows = pa.array(range(shard.start_row, shard.end_row), pa.int64())
        return documents.append_column(ROW, rows)
    rows = _read_whole(store, labels, [ROW]).column(ROW)
    numbers = pc.subtract(rows, shard.start_row)
    if len(rows) and not 0 <= pc.min(numbers).as_py() <= pc.max(numbers).as_py() < len(documents):
        raise StorageError(
            f"{store.url}/{shard.documents.key}: does not have all rows of the shard's label "
            f"files; `assay verify` reports more"
        )
    return documents.take(numbers).append_column(ROW, rows)


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
    table = read_file(store, file.key, columns)
    if table.num_rows != file.rows:
        raise StorageError(
            f"{store.url}/{file.key}: has {table.num_rows} rows where {file.rows} were published; "
            f"restore it, or delete it and run again"
        )
    return table
