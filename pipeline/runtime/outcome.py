"""Rows that failed: how many there are, and the work that tries them again.

A row failed if the model gave no answer about a text that it was asked about. Knows statuses and
the files that hold them. Knows nothing of why, nor of how work is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.errors import StorageError
from pipeline.ledger.cells import Committed, ReusableShard, WorkItem
from pipeline.sources.documents import OK, QUARANTINED
from pipeline.sources.shards import Shard
from pipeline.stores.store import Store

READ_THREADS = 16


def is_failed_status(status: str) -> bool:
    """Whether a row with this status has no answer though it should."""
    return status == QUARANTINED or status.startswith("error:")


def failed_rows(
    store: Store, shards: Sequence[Shard], done: Committed, counted: Mapping[str, int]
) -> int:
    """How many rows failed; of a shard, those of its worst task.

    `counted` has the shards, by id, of which that is known; the label files of the others are read.
    """
    unknown = [shard for shard in shards if shard.id not in counted]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        read = sum(pool.map(partial(_failed_in, store, done), unknown))
    return read + sum(counted.get(shard.id, 0) for shard in shards)


def retry_items(store: Store, shards: Sequence[Shard], done: Committed) -> list[WorkItem]:
    """A work item for each group of tasks that failed on the same readable rows of a shard.

    No task is asked again about a row that it has answered.
    """
    with ThreadPoolExecutor(READ_THREADS) as pool:
        found = pool.map(partial(_again, store, done), shards)
        return [work for work_items in found for work in work_items]


def _failed_in(store: Store, done: Committed, shard: Shard) -> int:
    files = [done.label_file(task, shard.id) for task in done.fp]
    return max(int(_failures(store, file.key).sum()) for file in files)


def _again(store: Store, done: Committed, shard: Shard) -> Iterator[WorkItem]:
    sid = shard.id
    tasks = [task for task in done.fp if sid in done.labels[task]]
    if sid not in done.documents or not tasks:
        return
    failed = {task: _failures(store, done.label_file(task, sid).key) for task in tasks}
    if not any(mask.any() for mask in failed.values()):
        return
    status = _status(store, done.documents_file(sid).key)
    readable = np.asarray(pc.equal(status, OK).to_numpy(), dtype=np.bool_)  # [rows]
    alike: dict[bytes, list[str]] = {}  # by the rows that are asked again
    for task, mask in failed.items():
        if (mask & readable).any():
            alike.setdefault((mask & readable).tobytes(), []).append(task)
    for tasks_alike in alike.values():
        answers = ReusableShard(sid, {task: done.label_file(task, sid).key for task in tasks_alike})
        retry = max(done.retry(task, sid) for task in tasks_alike) + 1
        yield WorkItem(shard, tuple(tasks_alike), documents=False, reuse=(answers,), retry=retry)


def _failures(store: Store, key: str) -> NDArray[np.bool_]:  # [rows]
    return np.array(
        [is_failed_status(status) for status in _status(store, key).to_pylist()], np.bool_
    )


def _status(store: Store, key: str) -> pa.ChunkedArray:
    data = pa.BufferReader(store.read(key))
    try:
        table = pq.read_table(data, columns=["status"], use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"{store.url}/{key}: cannot be read: {error}") from error
    return table.column("status").cast(pa.string())
