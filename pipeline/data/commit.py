"""Committing a shard: its files are built in memory, read back, and only then created.

Knows the rows of label and document files, and Parquet. Knows nothing of how an answer came about,
of Ray, or of which shards are done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.data.faults import reach
from pipeline.data.hashes import canonical_json
from pipeline.data.ledger import documents_key, label_key
from pipeline.data.shards import Shard
from pipeline.data.storage import Store
from pipeline.errors import StorageError

METADATA_PREFIX = "assay."
DOCUMENT_COLUMNS = ("doc_id", "content_hash", "n_chars", "status")
# Probabilities come out of float32 sums; more than this is not rounding.
P_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class LabelFile:
    """One task's rows for one shard, and what their file says of itself."""

    task: str
    fp: str
    table: pa.Table
    metadata: Mapping[str, str]
    retry: int = 0  # see `ledger.label_key`


@dataclass(frozen=True, slots=True)
class Created:
    """The keys that a commit made, and those that it found made by another."""

    made: tuple[str, ...]
    existing: tuple[str, ...]


def label_table(
    doc_ids: Sequence[str] | pa.Array | pa.ChunkedArray,
    p: NDArray[np.float32],  # [docs, labels]; a row of NaN is a document without an answer
    mass: NDArray[np.float32],  # [docs]; NaN where there is none
    n_tokens: NDArray[np.integer],  # [docs]
    n_chunks: NDArray[np.integer],  # [docs]
    status: Sequence[str],
    labels: Sequence[str],
) -> pa.Table:
    """The rows of a label file: label, its probabilities and its margin, or null for no answer."""
    docs, label_count = p.shape
    unanswered: NDArray[np.bool_] = np.asarray(np.isnan(p).any(axis=1))  # [docs]
    answered = p[~unanswered]
    assert label_count == len(labels) >= 2, (label_count, labels)
    assert len(doc_ids) == len(status) == docs, (len(doc_ids), len(status), docs)
    assert np.allclose(answered.sum(axis=1), 1, atol=P_SUM_TOLERANCE), answered
    largest = np.partition(p, label_count - 2, axis=1)[:, -2:]  # [docs, 2]: second, first
    columns = {
        "doc_id": _strings(doc_ids),
        "label": _best_label(p, unanswered, labels),
        "p": _probabilities(p, unanswered, labels),
        "mass": pa.array(mass, pa.float32(), mask=np.isnan(mass)),
        "margin": pa.array(largest[:, 1] - largest[:, 0], pa.float32(), mask=unanswered),
        "n_tokens": pa.array(n_tokens, pa.int32()),
        "n_chunks": pa.array(n_chunks, pa.int16()),
        "status": _strings(status).dictionary_encode(),
    }
    return pa.table(columns)


def documents_table(documents: pa.Table) -> pa.Table:
    """The rows of a documents file: the documents without their text."""
    kept = documents.select(DOCUMENT_COLUMNS)
    status = DOCUMENT_COLUMNS.index("status")
    return kept.set_column(status, "status", kept.column("status").dictionary_encode())


def to_parquet(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """The table as a Parquet file, with the metadata under `assay.*` keys."""
    described = {f"{METADATA_PREFIX}{key}": value for key, value in metadata.items()}
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(described), sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def verify(data: bytes, rows: int, doc_ids: pa.Array | pa.ChunkedArray) -> None:
    """StorageError unless the file reads back with these rows in this order."""
    try:
        table = pq.read_table(pa.BufferReader(data), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"a file just built cannot be read back: {error}") from error
    found = table.column("doc_id").combine_chunks()
    if table.num_rows != rows or not found.equals(_strings(doc_ids)):
        raise StorageError(
            f"a file just built has {table.num_rows} rows that are not the shard's {rows} "
            f"documents in order; nothing was committed, run again"
        )


def commit_shard(
    store: Store, shard: Shard, documents: pa.Table, label_files: Sequence[LabelFile]
) -> Created:
    """Creates the shard's documents file and one label file a task; the first writer's stands.

    Every file is built and read back before the first is created, so a shard whose rows do not
    fit leaves nothing behind.
    """
    if documents.num_rows != shard.rows:
        raise StorageError(
            f"{shard.path}: {documents.num_rows} documents for a shard of {shard.rows} rows; "
            f"nothing was committed, run again"
        )
    origin = {"shard": canonical_json(shard.to_json()).decode()}
    built = {documents_key(shard.id): to_parquet(documents_table(documents), origin)}
    for file in label_files:
        key = label_key(file.task, file.fp, shard.id, file.retry)
        built[key] = to_parquet(file.table, {**file.metadata, **origin})
    for data in built.values():
        verify(data, shard.rows, documents.column("doc_id"))
    made: dict[str, bool] = {}
    for key, data in built.items():
        reach(f"create {len(made)}")
        made[key] = store.create(key, data)
    reach("created")
    return Created(
        made=tuple(key for key, was_made in made.items() if was_made),
        existing=tuple(key for key, was_made in made.items() if not was_made),
    )


def _best_label(
    p: NDArray[np.float32], unanswered: NDArray[np.bool_], labels: Sequence[str]
) -> pa.DictionaryArray:
    best = np.where(unanswered, 0, p.argmax(axis=1)).astype(np.int32)
    indices = pa.array(best, mask=unanswered)
    return pa.DictionaryArray.from_arrays(indices, pa.array(list(labels), pa.string()))


def _probabilities(
    p: NDArray[np.float32], unanswered: NDArray[np.bool_], labels: Sequence[str]
) -> pa.StructArray:
    fields = [pa.field(label, pa.float32()) for label in labels]
    columns = [pa.array(np.ascontiguousarray(column), pa.float32()) for column in p.T]
    return pa.StructArray.from_arrays(columns, fields=fields, mask=pa.array(unanswered))


def _strings(values: Sequence[str] | pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        return values.combine_chunks()
    return values if isinstance(values, pa.Array) else pa.array(values, pa.string())
