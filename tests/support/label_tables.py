"""Rows of label files from given probabilities, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.ledger.columns import ANSWER_COLUMNS
from pipeline.ledger.label_rows import probability_columns, reading_columns


def label_rows(
    p: NDArray[np.float32],  # [docs, labels]; a row of NaN is a document without an answer
    mass: NDArray[np.float32],  # [docs]; NaN where there is none
    n_tokens: NDArray[np.integer],  # [docs]
    n_chunks: NDArray[np.integer],  # [docs]
    status: Sequence[str],
    labels: Sequence[str],
) -> pa.StructArray:
    """[docs] rows with one probability for each label."""
    assert len(status) == len(p), (len(status), len(p))
    columns = probability_columns(p, labels) | reading_columns(mass, n_tokens, n_chunks, status)
    ordered = [columns[name] for name in ANSWER_COLUMNS]
    return pa.StructArray.from_arrays(ordered, names=ANSWER_COLUMNS)
