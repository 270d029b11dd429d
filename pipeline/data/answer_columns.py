"""Which columns a task's answers have, and of what types.

Knows the columns of label files. Knows nothing of rows, of files or of how answers are made.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from pipeline.spec import TaskSpec

# What a row of answers is, where every label has a probability in a struct and none is calibrated.
ANSWER_COLUMNS = ("label", "p", "mass", "margin", "n_tokens", "n_chunks", "status")
CALIBRATED = "calibrated"  # beside them, where a task has a calibration
CALIBRATED_COLUMNS = ("label", "p", "margin")  # of its struct
# Labels with their probabilities, in an order that means something.
RANKED = pa.list_(pa.field("element", pa.struct([("label", pa.string()), ("p", pa.float32())])))


def answer_columns(task: TaskSpec) -> tuple[str, ...]:
    """The columns of the task's label files, behind `doc_id`."""
    return columns_with(
        ranked=task.top_k is not None,
        levels=task.separator is not None,
        calibrated=task.calibration is not None,
    )


def columns_with(*, ranked: bool, levels: bool, calibrated: bool) -> tuple[str, ...]:
    """The columns of label files whose answers have these."""
    label, p, *others = ANSWER_COLUMNS
    between = ("levels",) if levels else ()
    behind = (CALIBRATED,) if calibrated else ()
    return (label, "top" if ranked else p, *between, *others, *behind)


def calibrated_type(p: pa.StructType) -> pa.StructType:
    """The type of the calibrated column beside raw probabilities of the type `p`."""
    return pa.struct(list(zip(CALIBRATED_COLUMNS, (pa.string(), p, pa.float32()), strict=True)))


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
        types[CALIBRATED] = calibrated_type(types["p"])
    return pa.struct([(name, types[name]) for name in columns])
