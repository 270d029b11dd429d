"""A task's answers out of its struct column: probabilities as an array, and the statuses.

Knows the columns that a label file may have: p, or the likeliest labels (`top`), and a calibrated p
beside it. Knows nothing of documents, snapshots or figures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.data.answer_columns import CALIBRATED

RAW = "raw"  # beside `CALIBRATED`, the name of a column


def versions(task_type: pa.StructType) -> tuple[str, ...]:
    """Which probabilities there are: the model's own, and the calibrated where there are any."""
    return (RAW, CALIBRATED) if task_type.get_field_index(CALIBRATED) >= 0 else (RAW,)


def statuses(answers: pa.StructArray) -> list[str]:  # [rows]
    found: list[str] = pc.struct_field(answers, "status").to_pylist()
    return found


def probabilities(
    answers: pa.StructArray, version: str, labels: Sequence[str]
) -> NDArray[np.float64]:  # [rows, labels]; NaN where there is no answer
    part = pc.struct_field(answers, CALIBRATED) if version == CALIBRATED else answers
    if part.type.get_field_index("p") >= 0:
        columns = [pc.struct_field(part, ["p", label]) for label in labels]
        filled = [column.to_numpy(zero_copy_only=False) for column in columns]
        return np.stack(filled, axis=1).astype(np.float64)
    return _from_top(pc.struct_field(part, "top").to_pylist(), labels)


def _from_top(
    rows: Sequence[Sequence[dict[str, object]] | None], labels: Sequence[str]
) -> NDArray[np.float64]:  # [rows, labels]
    """What the likeliest labels leave is shared evenly by all others: more is not known."""
    index = {label: number for number, label in enumerate(labels)}
    p = np.full((len(rows), len(labels)), np.nan)
    for row, top in enumerate(rows):
        if not top:
            continue
        known = {index[str(each["label"])]: float(str(each["p"])) for each in top}
        left = max(0.0, 1 - sum(known.values()))
        p[row] = left / max(1, len(labels) - len(known))
        p[row, list(known)] = list(known.values())
    return p
