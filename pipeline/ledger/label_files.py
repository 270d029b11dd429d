"""The files of a shard. Entry points: `commit_shard` writes them, `read_file` reads one.

The files are built in memory and read back before the first is created, so an object that exists
is whole. Its existence is the record that the shard is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import StorageError
from pipeline.hashes import canonical_json, parse_json
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS, SLICED_FILE_COLUMNS
from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.keys import documents_key, label_key
from pipeline.sources.shards import Shard
from pipeline.sources.slices import inside_rows, is_inside
from pipeline.stores.store import Store

METADATA_PREFIX = "assay."
TAKEN_OVER = "taken_over"  # by shard, the number of rows with its answers; absent without any


@dataclass(frozen=True, slots=True)
class LabelFile:
    """One task's rows for one shard, and the metadata of their file."""

    task: str
    fp: str
    table: pa.Table
    metadata: Mapping[str, str]
    retry: int = 0  # the number of the retry; 0: the first try

    def key(self, shard: Shard) -> str:
        """The key of the file, if it is of this shard."""
        return label_key(self.task, self.fp, shard.id, self.retry)


def documents_table(
    documents: pa.Table, columns: Sequence[str] = DOCUMENTS_FILE_COLUMNS
) -> pa.Table:
    """The rows of a documents file: the documents without their texts."""
    kept = documents.select(columns)
    status = columns.index("status")
    return kept.set_column(status, "status", kept.column("status").dictionary_encode())


def to_parquet(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """The table as a Parquet file, with the metadata under `assay.*` keys."""
    described = {f"{METADATA_PREFIX}{key}": value for key, value in metadata.items()}
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(described), sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def verify(data: bytes, rows: int, doc_ids: pa.ChunkedArray) -> None:
    """StorageError unless the file reads back with these rows in this order."""
    try:
        table = pq.read_table(pa.BufferReader(data), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"a file just built cannot be read back: {error}") from error
    if table.num_rows != rows or not table.column("doc_id").equals(doc_ids):
        raise StorageError(
            f"a file just built has {table.num_rows} rows, which are not the {rows} documents "
            f"of the shard in order; nothing was committed, run again"
        )


def read_file(store: Store, key: str, columns: Sequence[str] | None) -> pa.Table:
    """These columns of a file in this order, or all; StorageError if it cannot be read."""
    data = store.read(key)
    try:
        table = pq.read_table(pa.BufferReader(data), columns=columns, use_threads=False)
        return table if columns is None else table.select(columns)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise StorageError(f"{store.url}/{key}: cannot be read: {error}") from error


def metadata_of(table: pa.Table) -> dict[str, str]:
    """What `to_parquet` was given as metadata."""
    stored = (table.schema.metadata or {}).items()
    named = {name.decode(): value.decode() for name, value in stored}
    return {name.removeprefix(METADATA_PREFIX): value for name, value in named.items()}


def shard_in(table: pa.Table) -> Shard:
    """The shard of a file of results, by its metadata."""
    return Shard.from_json(parse_json(metadata_of(table)["shard"]))


def commit_labels(store: Store, shard: Shard, file: LabelFile) -> bool:
    """Creates one label file of a shard whose documents file exists; False if the file existed."""
    documents = read_file(store, documents_key(shard.id), ["doc_id"])
    origin = {"shard": canonical_json(shard.to_json()).decode()}
    data = to_parquet(file.table, {**file.metadata, **origin})
    verify(data, documents.num_rows, documents.column("doc_id"))
    failpoint("join")
    return store.create(file.key(shard), data)


def commit_shard(
    store: Store, shard: Shard, documents: pa.Table, label_files: Sequence[LabelFile]
) -> list[str]:
    """Creates the shard's documents file and one label file per task; the keys of the new files.

    Existing files stay. Every file is built and read back before the first is created, so a shard
    with wrong rows leaves no file. The files of a sliced shard have the rows of its slice, whose
    `status` in the documents is not OUTSIDE. StorageError if a file does not have the shard's rows,
    or if these are not the rows of its documents file.
    """
    if documents.num_rows != shard.rows:
        raise StorageError(
            f"{shard.path}: {documents.num_rows} documents for a shard of {shard.rows} rows; "
            f"nothing was committed, run again"
        )
    origin = {"shard": canonical_json(shard.to_json()).decode()}
    kept, inside = documents, None
    columns: tuple[str, ...] = DOCUMENTS_FILE_COLUMNS
    if shard.slice is not None:
        kept, inside = inside_rows(shard, documents), is_inside(documents)
        columns = SLICED_FILE_COLUMNS
    key, ids = documents_key(shard.id), kept.column("doc_id")
    exists = bool(label_files) and _has_documents(store, shard, ids)
    built = {} if exists else {key: to_parquet(documents_table(kept, columns), origin)}
    for file in label_files:
        table = file.table if inside is None else file.table.filter(inside)
        built[file.key(shard)] = to_parquet(table, {**file.metadata, **origin})
    for data in built.values():
        verify(data, kept.num_rows, ids)
    made = []
    for number, (name, data) in enumerate(built.items(), start=exists):
        failpoint(f"create {number}")
        if store.create(name, data):
            made.append(name)
        elif name == key:  # another run has created it since
            _has_documents(store, shard, ids)
    failpoint("created")
    return made


def _has_documents(store: Store, shard: Shard, ids: pa.ChunkedArray) -> bool:
    """Whether the shard has a documents file; StorageError if that has other documents."""
    key = documents_key(shard.id)
    try:
        stored = read_file(store, key, ["doc_id"]).column("doc_id")
    except StorageError:
        if not any(each.key == key for each in store.list(key)):
            return False
        # — another run may have created it between the two requests
        stored = read_file(store, key, ["doc_id"]).column("doc_id")
    if not stored.equals(ids):
        raise StorageError(
            f"{store.url}/{key}: has other documents than {shard.path}, so no labels were "
            f"committed; restore the input, or delete this file and its shard's label files"
        )
    return True
