"""The rows of a label file, from what the labelling stage sends of a task.

Knows the columns that travel between stages, and those of label files. Knows nothing of models, of
keys or of Ray.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pipeline.data.commit import label_table
from pipeline.spec import TaskSpec


def answers_table(block: pa.Table, task: TaskSpec) -> pa.Table:
    """The task's answers about the documents of a block."""
    answers = block.column(f"log_probs:{task.name}").combine_chunks().flatten()
    log_probs = answers.to_numpy(zero_copy_only=False).reshape(block.num_rows, len(task.labels))
    with np.errstate(invalid="ignore"):  # a row without an answer is NaN, and stays it
        log_mass = np.logaddexp.reduce(log_probs, axis=1, keepdims=True)  # [docs, 1]
    mass = np.minimum(np.exp(log_mass[:, 0]), 1)  # sums of float32 can pass 1 by an ulp
    return label_table(
        block.column("doc_id"),
        p=np.exp(log_probs - log_mass),
        mass=np.full_like(mass, np.nan) if task.readout else mass,  # a readout knows labels alone
        n_tokens=block.column("n_tokens").to_numpy(),
        n_chunks=block.column("n_chunks").to_numpy(),
        status=block.column("label_status").to_pylist(),
        labels=list(task.labels),
    )
