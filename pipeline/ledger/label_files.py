"""Committing a shard: its files are built in memory, read back, and only then created.

Knows the rows of label and document files, and Parquet. Knows nothing of how an answer came about,
of Ray, or of which shards are done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.errors import StorageError
from pipeline.fitted.calibration import Calibration
from pipeline.hashes import canonical_json
from pipeline.ledger.blocks import LabelledDocuments
from pipeline.ledger.columns import (
    CALIBRATED,
    CALIBRATED_COLUMNS,
    DOCUMENTS_FILE_COLUMNS,
    RANKED,
    RAW,
    answer_columns,
    calibrated_type,
    probabilities,
)
from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.keys import documents_key, label_key
from pipeline.sources.shards import Shard
from pipeline.spec.schema import TaskSpec
from pipeline.stores.store import Store

METADATA_PREFIX = "assay."
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
    kept = documents.select(DOCUMENTS_FILE_COLUMNS)
    status = DOCUMENTS_FILE_COLUMNS.index("status")
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
        failpoint(f"create {len(made)}")
        made[key] = store.create(key, data)
    failpoint("created")
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


# Whole labels can be less likely than float32 can say; 0 would say that they are impossible.
LEAST = np.finfo(np.float32).smallest_subnormal


def answers_table(labelled: LabelledDocuments, task: TaskSpec) -> pa.Table:
    """The task's raw answers about the documents."""
    scores = labelled.scores[task.name]
    log_mass = scores.log_mass  # [docs]
    p = np.exp(scores.log_probs - log_mass[:, None])  # [docs, kept]
    rows: dict[str, Any] = {
        "mass": _mass(log_mass, task),
        "n_tokens": labelled.n_tokens,
        "n_chunks": labelled.n_chunks,
        "status": labelled.status,
    }
    ids = labelled.documents.column("doc_id")
    labels = list(task.labels)
    if scores.label_ids is None or task.top_k is None:
        table = label_table(ids, p=p, labels=labels, **rows)
    else:
        table = _ranked_table(ids, p, scores.label_ids, labels, task.top_k, rows)
    if task.separator and scores.levels is not None:
        of_path = np.exp(scores.levels - log_mass[:, None])  # [docs, levels]
        column = _levels(table.column("label").to_pylist(), of_path, task.separator)
        table = table.append_column("levels", column)
    raw = [column for column in answer_columns(task) if column != CALIBRATED]
    return table.select(["doc_id", *raw])


def _mass(log_mass: NDArray[np.float32], task: TaskSpec) -> NDArray[np.float32]:  # [docs]
    # — scores are no probabilities, and a trained readout knows nothing beside its labels
    if task.length_penalty or task.readout is not None:
        return np.full_like(log_mass, np.nan)
    # — sums of float32 can pass 1 by an ulp, and a label that begins another counts that twice
    return np.clip(np.exp(log_mass), LEAST, 1)


def _ranked_table(
    doc_ids: pa.ChunkedArray,
    p: NDArray[np.float32],  # [docs, kept], falling; a row of NaN is a document without an answer
    places: NDArray[np.int32],  # [docs, kept]: which labels
    labels: Sequence[str],
    top_k: int,
    rows: dict[str, Any],
) -> pa.Table:
    unanswered = np.asarray(np.isnan(p).any(axis=1))  # [docs]
    scored = np.where(unanswered[:, None], False, p > 0)[:, :top_k]
    names = pa.array(labels, pa.string()).take(pa.array(places[:, :top_k][scored]))
    top = _ranked(names, p[:, :top_k][scored], scored.sum(axis=1), unanswered)
    best = pa.array(places[:, 0], mask=unanswered)
    label = pa.array(labels, pa.string()).take(best).dictionary_encode()
    columns = {
        "doc_id": doc_ids.combine_chunks(),
        "label": label,
        "top": top,
        "mass": pa.array(rows["mass"], pa.float32(), mask=np.isnan(rows["mass"])),
        "margin": pa.array(p[:, 0] - p[:, 1], pa.float32(), mask=unanswered),
        "n_tokens": pa.array(rows["n_tokens"], pa.int32()),
        "n_chunks": pa.array(rows["n_chunks"], pa.int16()),
        "status": pa.array(rows["status"], pa.string()).dictionary_encode(),
    }
    return pa.table(columns)


def _levels(
    best: Sequence[str | None],
    p: NDArray[np.float32],  # [docs, levels]: of the best label's path; NaN behind its end
    separator: str,
) -> pa.ListArray:
    paths = [[] if label is None else _path(label, separator) for label in best]
    counts = np.array([len(path) for path in paths], np.int64)
    there = np.arange(p.shape[1]) < counts[:, None]
    names = pa.array([name for path in paths for name in path], pa.string())
    return _ranked(names, np.minimum(p[there], 1), counts, np.array([b is None for b in best]))


def _path(label: str, separator: str) -> list[str]:
    parts = label.split(separator)
    return [separator.join(parts[:end]) for end in range(1, len(parts) + 1)]


def _ranked(
    names: pa.Array,
    p: NDArray[np.float32],  # [names]
    counts: NDArray[np.integer],  # [docs]: names of each
    unanswered: NDArray[np.bool_],  # [docs]
) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    pairs = pa.StructArray.from_arrays([names, pa.array(p, pa.float32())], fields=_pair_fields())
    return pa.ListArray.from_arrays(
        pa.array(offsets), pairs, type=RANKED, mask=pa.array(np.asarray(unanswered, dtype=bool))
    )


def _pair_fields() -> list[pa.Field]:
    kind = RANKED.value_type
    return [kind.field(index) for index in range(kind.num_fields)]


def with_calibrated(table: pa.Table, calibration: Calibration) -> pa.Table:
    """The label rows with the column beside them, null where there is no answer."""
    rows = table.select(["p"]).combine_chunks().to_struct_array().combine_chunks()
    raw = probabilities(rows, RAW, calibration.labels)  # [docs, labels]
    answered = ~np.isnan(raw).any(axis=1)  # [docs]
    p = np.full(raw.shape, np.nan, np.float32)
    p[answered] = calibration.apply(raw[answered])
    nothing = np.zeros(len(p), np.int16)
    answers = label_table(
        table.column("doc_id"),
        p=p,
        mass=np.full(len(p), np.nan, np.float32),
        n_tokens=nothing,
        n_chunks=nothing,
        status=[""] * len(p),
        labels=calibration.labels,
    )
    columns = [answers.column(name).combine_chunks() for name in CALIBRATED_COLUMNS]
    kind = calibrated_type(answers.schema.field("p").type)
    column = pa.StructArray.from_arrays(
        [values.cast(field.type) for values, field in zip(columns, kind, strict=True)],
        fields=list(kind),
        mask=pa.array(~answered),
    )
    return table.append_column(CALIBRATED, column)
