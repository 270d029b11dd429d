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

from pipeline.ledger.cells import Committed
from pipeline.ledger.label_files import TAKEN_OVER, LabelFile, metadata_of, read_file
from pipeline.sources.documents import QUARANTINED
from pipeline.stores.store import Store

READ_THREADS = 16


class FileCounts(NamedTuple):
    """The counts of one label file."""

    retry: int  # the number of the retry that the file is of; 0: the first try
    failed: int  # rows
    taken_over: int  # rows with the answers of other shards


Counts = Mapping[str, Mapping[str, FileCounts]]  # by task and cell
NO_COUNTS: Counts = {}


def is_failed_status(status: str) -> bool:
    """Whether a row with this status should have an answer and has none."""
    return status == QUARANTINED or status.startswith("error:")


def failed_mask(answers: pa.Table) -> NDArray[np.bool_]:  # [rows]
    """Which rows of a label file, of which this has the column `status`, failed."""
    status = answers.column("status").cast(pa.string()).to_pylist()
    return np.array([is_failed_status(each) for each in status], np.bool_)


def counts_of(file: LabelFile) -> FileCounts:
    """The counts of a label file: of its column `status`, and its metadata."""
    status = file.table.column("status").cast(pa.string())
    own = status if file.inside is None else status.filter(pa.array(file.inside))
    by_status = pc.value_counts(own).to_pylist()
    failed = sum(each["counts"] for each in by_status if is_failed_status(each["values"]))
    by_shard = json.loads(file.metadata.get(TAKEN_OVER, "{}"))
    return FileCounts(file.retry, failed, sum(by_shard.values()))


def merged(first: Counts, second: Counts) -> dict[str, dict[str, FileCounts]]:
    """The counts of both; of a file that both have, those of the second."""
    return {task: {**first.get(task, {}), **second.get(task, {})} for task in {**first, **second}}


def complete_counts(
    store: Store, done: Committed, cells: Iterable[str], known: Counts
) -> dict[str, dict[str, FileCounts]]:
    """The counts of the cells' current label files; a file that is not in `known` is read."""

    def read(of: tuple[str, str]) -> FileCounts:
        task, cell = of
        answers = read_file(store, done.label_file(task, cell).key, ["status"])
        retry, metadata = done.retry(task, cell), metadata_of(answers)
        return counts_of(LabelFile(task, done.fp[task], answers, metadata, retry))

    counts: dict[str, dict[str, FileCounts]] = {task: {} for task in done.fp}
    unknown = []
    for cell in cells:
        for task, of_task in counts.items():
            own = known.get(task, {}).get(cell)
            if own is not None and own.retry == done.retry(task, cell):
                of_task[cell] = own
            elif cell in done.labels[task]:
                unknown.append((task, cell))
    with ThreadPoolExecutor(READ_THREADS) as pool:
        for (task, cell), own in zip(unknown, pool.map(read, unknown), strict=True):
            counts[task][cell] = own
    return counts
