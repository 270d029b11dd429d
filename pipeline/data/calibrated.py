"""The column `calibrated` of a label file: what a calibration makes of its raw answers.

Knows the columns of label files. Knows nothing of where a calibration comes from.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pipeline.data.answer_columns import CALIBRATED, CALIBRATED_COLUMNS, calibrated_type
from pipeline.data.answer_values import RAW, probabilities
from pipeline.data.commit import label_table
from pipeline.evaluation.calibration import Calibration


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
