"""Which columns a task's answers have, and of what types.

Knows the columns of label files. Knows nothing of rows, of files or of how answers are made.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from pipeline.spec import TaskSpec

# What a row of answers is, where every label has a probability in a struct.
ANSWER_COLUMNS = ("label", "p", "mass", "margin", "n_tokens", "n_chunks", "status")
# Labels with their probabilities, in an order that means something.
RANKED = pa.list_(pa.field("element", pa.struct([("label", pa.string()), ("p", pa.float32())])))


def answer_columns(task: TaskSpec) -> tuple[str, ...]:
    """The columns of the task's label files, behind `doc_id`."""
    label, p, *others = ANSWER_COLUMNS
    levels = ("levels",) if task.separator else ()
    return (label, p if task.top_k is None else "top", *levels, *others)


def answers_type(columns: Sequence[str], labels: Sequence[str]) -> pa.StructType:
    """A row of answers as one struct, dictionaries as strings."""
    types = {
        "label": pa.string(),
        "mass": pa.float32(),
        "margin": pa.float32(),
        "n_tokens": pa.int32(),
        "n_chunks": pa.int16(),
        "status": pa.string(),
        "top": RANKED,
        "levels": RANKED,
    }
    if "p" in columns:
        types["p"] = pa.struct([(label, pa.float32()) for label in labels])
    return pa.struct([(name, types[name]) for name in columns])
