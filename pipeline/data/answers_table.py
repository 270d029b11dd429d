"""The rows of a label file, from what the labelling stage sends of a task.

    log_probs:<task>   of every label, or of the likeliest     log_mass:<task>   of all, together
    places:<task>      which labels those are                  levels:<task>     of the best path

Knows the columns that travel between stages, and those of label files. Knows nothing of models, of
keys or of Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.data.answer_columns import CALIBRATED, RANKED, answer_columns
from pipeline.data.commit import label_table
from pipeline.spec import TaskSpec

# Whole labels can be less likely than float32 can say; 0 would say that they are impossible.
LEAST = np.finfo(np.float32).smallest_subnormal


def answers_table(block: pa.Table, task: TaskSpec) -> pa.Table:
    """The task's raw answers about the documents of a block."""
    log_probs = _rectangle(block, f"log_probs:{task.name}", np.float32)  # [docs, kept]
    log_mass = np.asarray(block.column(f"log_mass:{task.name}").to_numpy())  # [docs]
    p = np.exp(log_probs - log_mass[:, None])
    rows: dict[str, Any] = {
        "mass": _mass(log_mass, task),
        "n_tokens": block.column("n_tokens").to_numpy(),
        "n_chunks": block.column("n_chunks").to_numpy(),
        "status": block.column("label_status").to_pylist(),
    }
    ids = block.column("doc_id")
    labels = list(task.labels)
    if task.top_k is None:
        table = label_table(ids, p=p, labels=labels, **rows)
    else:
        places = _rectangle(block, f"places:{task.name}", np.int32)  # [docs, kept]
        table = _ranked_table(ids, p, places, labels, task.top_k, rows)
    if task.separator:
        levels = _rectangle(block, f"levels:{task.name}", np.float32)  # [docs, levels]
        of_path = np.exp(levels - log_mass[:, None])
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


def _rectangle(block: pa.Table, column: str, kind: type) -> NDArray[Any]:
    """[docs, width]; a null is NaN."""
    lists = block.column(column).combine_chunks()
    values = lists.flatten().to_numpy(zero_copy_only=False)
    return np.asarray(values, kind).reshape(len(lists), lists.type.list_size)
