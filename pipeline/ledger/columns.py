"""The columns of label files: their names and types, and how their values are read.

Entry points: `answer_columns` and `answers_type` for the columns, `probabilities` for the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.spec.stages import DocumentsSpec
from pipeline.spec.tasks import TaskSpec

Bools = NDArray[np.bool_]

DOCUMENTS_FILE_COLUMNS = ("doc_id", "content_hash", "n_chars", "status")  # of a documents file
# Of a task with the probabilities of all labels in a struct.
ANSWER_COLUMNS = ("label", "p", "mass", "margin", "n_tokens", "n_chunks", "status")
# Of a document in several chunks, the one whose answer it is: where it begins and ends in the text,
# in characters. Only of tasks with `chunks: max` where documents are read in chunks.
CHUNK = "chunk"
CHUNK_TYPE = pa.struct([("start", pa.int32()), ("end", pa.int32())])
STAGE = "stage"  # the number of the stage that decided, from 1; only of tasks with a cascade
# An ordered list of labels with their probabilities.
RANKED = pa.list_(pa.field("element", pa.struct([("label", pa.string()), ("p", pa.float32())])))
LABELS_TYPE = pa.list_(pa.field("element", pa.string()))


def has_chunk(task: TaskSpec, documents: DocumentsSpec | None) -> bool:
    """Whether a task's answers have the chunk that decided, for documents that are read so."""
    is_chunked = documents is not None and documents.too_long == "chunk"
    return is_chunked and task.chunks == "max" and task.classifier is None


def answer_columns(task: TaskSpec, documents: DocumentsSpec | None = None) -> tuple[str, ...]:
    """The columns of the task's label files after `doc_id`."""
    label, p, *others = ANSWER_COLUMNS
    path = ("levels",) if task.separator is not None else ()
    stage = (STAGE,) if task.stages else ()
    score = ("score",) if task.kind == "score" else ()
    first = "labels" if task.kind == "multi" else label
    chunk = (CHUNK,) if has_chunk(task, documents) else ()
    return (first, p if task.top_k is None else "top", *score, *path, *others, *chunk, *stage)


def answers_type(columns: Sequence[str], labels: Sequence[str]) -> pa.StructType:
    """The type of a row of answers as one struct, with strings instead of dictionaries."""
    types = {
        "label": pa.string(),
        "labels": LABELS_TYPE,
        "score": pa.float32(),
        "mass": pa.float32(),
        "margin": pa.float32(),
        "n_tokens": pa.int32(),
        "n_chunks": pa.int16(),
        "status": pa.string(),
        CHUNK: CHUNK_TYPE,
        STAGE: pa.int8(),
        "top": RANKED,
        "levels": RANKED,
    }
    if "p" in columns:
        types["p"] = pa.struct([(label, pa.float32()) for label in labels])
    return pa.struct([(name, types[name]) for name in columns])


def labels_of(answers: pa.StructArray) -> pa.StringArray:
    """The label of each answer in turn; of the kind `multi`, each label that applies."""
    if answers.type.get_field_index("labels") >= 0:
        return pc.list_flatten(answers.field("labels"))
    return answers.field("label").drop_null()


def structs(table: pa.Table) -> pa.StructArray:
    """The rows of the table as structs, with strings for dictionaries."""
    types = (f.type.value_type if pa.types.is_dictionary(f.type) else f.type for f in table.schema)
    fields = [field.with_type(kind) for field, kind in zip(table.schema, types, strict=True)]
    return table.cast(pa.schema(fields)).to_struct_array().combine_chunks()


def with_column(rows: pa.StructArray, name: str, values: pa.Array) -> pa.StructArray:
    """The rows with one more column."""
    names = [field.name for field in rows.type]
    return pa.StructArray.from_arrays([*rows.flatten(), values], names=[*names, name])


def only(answers: pa.StructArray, rows: NDArray[np.bool_]) -> pa.StructArray:
    """[docs] the answers in these rows, null in others."""
    return pc.if_else(pa.array(rows), answers, None)


def overlaid(answers: pa.StructArray | None, below: pa.StructArray) -> pa.StructArray:
    """[docs] the answers, and the rows below where there is none; with the columns of these."""
    if answers is None:
        return below
    return pc.coalesce(cast_rows(answers, below.type), below)


def cast_rows(answers: pa.StructArray, kind: pa.StructType) -> pa.StructArray:
    """[docs] the answers with these columns; one that they lack is null."""
    columns = [
        pc.struct_field(answers, [field.name]).cast(field.type)
        if answers.type.get_field_index(field.name) >= 0
        else pa.nulls(len(answers), field.type)
        for field in kind
    ]
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=answers.is_null())


def probabilities(
    answers: pa.StructArray, labels: Sequence[str]
) -> NDArray[np.float64]:  # [rows, labels]; NaN where there is no answer
    """The probabilities of all labels; of the kind `multi`, each of its own."""
    if answers.type.get_field_index("p") >= 0:
        columns = [pc.struct_field(answers, ["p", label]) for label in labels]
        filled = [column.to_numpy(zero_copy_only=False) for column in columns]
        return np.stack(filled, axis=1).astype(np.float64)
    return _from_top(pc.struct_field(answers, "top").to_pylist(), labels)


def _from_top(
    rows: Sequence[Sequence[dict[str, object]] | None], labels: Sequence[str]
) -> NDArray[np.float64]:  # [rows, labels]
    """The probabilities of ranked answers. Other labels share the rest evenly."""
    index = {label: number for number, label in enumerate(labels)}
    p = np.full((len(rows), len(labels)), np.nan)
    for row, top in enumerate(rows):
        if not top:
            continue
        known = {index[str(ranked["label"])]: float(str(ranked["p"])) for ranked in top}
        unranked = max(0.0, 1 - sum(known.values()))
        p[row] = unranked / max(1, len(labels) - len(known))
        p[row, list(known)] = list(known.values())
    return p
