"""Rows that should have an answer and have none: which, and how many of each label file.

Entry point: `complete_counts`, which reads only the label files whose counts are not known. A row
failed if the model was asked about its text and gave no answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.ledger.label_files import TAKEN_OVER, metadata_of, read_file
from pipeline.sources.documents import QUARANTINED
from pipeline.stores.store import Store

READ_THREADS = 16


class FileCounts(NamedTuple):
    """The counts of one label file."""

    failed: int  # rows
    taken_over: int  # rows with the answers of other shards


Counts = Mapping[str, FileCounts]  # by the key of a label file
NO_COUNTS: Counts = {}


def is_failed_status(status: str) -> bool:
    """Whether a row with this status should have an answer and has none."""
    return status == QUARANTINED or status.startswith("error:")


def failed_mask(status: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:  # [rows]
    """Which rows of a label file failed, by its column `status`."""
    values = status.cast(pa.string()).to_pylist()
    return np.array([is_failed_status(value) for value in values], np.bool_)


def counts_of(status: pa.Array | pa.ChunkedArray, metadata: Mapping[str, str]) -> FileCounts:
    """The counts of a label file with this column `status`, and these metadata."""
    by_status = pc.value_counts(status.cast(pa.string())).to_pylist()
    failed = sum(count["counts"] for count in by_status if is_failed_status(count["values"]))
    return FileCounts(failed, sum(json.loads(metadata.get(TAKEN_OVER, "{}")).values()))


def complete_counts(store: Store, keys: Iterable[str], known: Counts) -> dict[str, FileCounts]:
    """The known counts, and those of these label files; a file that is not in `known` is read."""

    def read(key: str) -> FileCounts:
        answers = read_file(store, key, ["status"])
        return counts_of(answers.column("status"), metadata_of(answers))

    unknown = [key for key in keys if key not in known]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        return {**known, **dict(zip(unknown, pool.map(read, unknown), strict=True))}
