"""The files of a shard. Entry points: `commit_shard` writes them, `read_file` reads one.

The files are built in memory and read back before the first is created, so an object that exists
is whole. Its existence is the record that the shard is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.errors import StorageError
from pipeline.hashes import canonical_json, parse_json
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS, ROW
from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.keys import documents_key, label_key
from pipeline.sources.shards import Shard
from pipeline.stores.store import Store

METADATA_PREFIX = "assay."
TAKEN_OVER = "taken_over"  # by shard, the number of rows with its answers; absent without any


@dataclass(frozen=True, slots=True)
class LabelFile:
    """One task's rows for one shard, and the metadata of their file."""

    task: str
    fp: str
    table: pa.Table  # [docs]
    metadata: Mapping[str, str]
    retry: int = 0  # the number of the retry; 0: the first try
    cell: str | None = None  # None: that of the shard
    inside: NDArray[np.bool_] | None = None  # [docs]: the rows that the file has; None: all

    def key(self, shard: Shard) -> str:
        """The key of the file, if it is of this shard."""
        return label_key(self.task, self.fp, self.cell or shard.cell, self.retry)


def documents_table(documents: pa.Table) -> pa.Table:
    """The rows of a documents file: the documents without their texts."""
    kept = documents.select(DOCUMENTS_FILE_COLUMNS)
    status = kept.column("status").cast(pa.string()).dictionary_encode()
    return kept.set_column(DOCUMENTS_FILE_COLUMNS.index("status"), "status", status)


def to_parquet(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """The table as a Parquet file, with the metadata under `assay.*` keys."""
    described = {f"{METADATA_PREFIX}{key}": value for key, value in metadata.items()}
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(described), sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def verify(data: bytes, doc_ids: pa.ChunkedArray) -> None:
    """StorageError unless the file reads back with these rows in this order."""
    try:
        table = pq.read_table(pa.BufferReader(data), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"a file just built cannot be read back: {error}") from error
    if not table.column("doc_id").equals(doc_ids):
        raise StorageError(
            f"a file just built has {table.num_rows} rows, which are not the {len(doc_ids)} "
            f"documents of the shard in order; nothing was committed, run again"
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
    """The metadata that `to_parquet` wrote."""
    stored = (table.schema.metadata or {}).items()
    named = {name.decode(): value.decode() for name, value in stored}
    return {name.removeprefix(METADATA_PREFIX): value for name, value in named.items()}


def shard_in(table: pa.Table) -> Shard:
    """The shard of a file of results, by its metadata."""
    return Shard.from_json(parse_json(metadata_of(table)["shard"]))


def commit_shard(
    store: Store, shard: Shard, documents: pa.Table, label_files: Sequence[LabelFile]
) -> list[str]:
    """Creates the shard's documents file and its label files; the keys of the new files.

    Existing files stay. Every file is built and read back before the first is created, so a shard
    with wrong rows leaves no file. StorageError if the documents are not the shard's rows, or not
    those of its documents file.
    """
    if documents.num_rows != shard.rows:
        raise StorageError(
            f"{shard.path}: {documents.num_rows} documents for a shard of {shard.rows} rows; "
            f"nothing was committed, run again"
        )
    whole = {"shard": canonical_json(shard.whole.to_json()).decode()}
    origin = {"shard": canonical_json(shard.to_json()).decode()}
    key, ids = documents_key(shard.id), documents.column("doc_id")
    exists = bool(label_files) and _has_documents(store, shard, ids)
    built = {} if exists else {key: to_parquet(documents_table(documents), whole)}
    for data in built.values():
        verify(data, ids)
    for file in label_files:
        doc_ids, table = ids, file.table
        if file.inside is not None:
            first = shard.piece.start_row
            rows = pa.array(range(first, first + shard.rows), pa.int64())
            inside = pa.array(file.inside)
            doc_ids, table = doc_ids.filter(inside), table.append_column(ROW, rows).filter(inside)
        data = to_parquet(table, {**file.metadata, **origin})
        verify(data, doc_ids)
        built[file.key(shard)] = data
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
