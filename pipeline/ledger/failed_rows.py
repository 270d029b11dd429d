"""Counts of each file of results: of rows that should have an answer and have none, and its hash.

Entry points: `complete_counts`, which reads only the files whose counts are not known, and
`check_unchanged`. A row failed if the model was asked about its text and gave no answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import StorageError, UnavailableError
from pipeline.ledger.cells import Committed
from pipeline.ledger.keys import parse_key
from pipeline.ledger.label_files import HASH, SINCE, TAKEN_OVER, metadata_of, read_file, remedy
from pipeline.sources.documents import QUARANTINED, SKIPPED
from pipeline.stores.store import Store

READ_THREADS = 16
_SHOWN = 20  # damaged files


class FileCounts(NamedTuple):
    """The counts of one file, and which content they are of."""

    failed: int  # rows
    taken_over: int  # rows with the answers of other shards
    hash: str
    since: int = 0  # the number of the last snapshot when the run that made the file began
    skipped: int = 0  # rows that the question is not asked about


Counts = Mapping[str, FileCounts]  # by the key of a documents or label file
NO_COUNTS: Counts = {}


def is_failed_status(status: str) -> bool:
    """Whether a row with this status should have an answer and has none."""
    return status == QUARANTINED or status.startswith("error:")


def failed_mask(status: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:  # [rows]
    """Which rows of a label file failed, by its column `status`."""
    values = status.cast(pa.string()).to_pylist()
    return np.array([is_failed_status(value) for value in values], np.bool_)


def counts_of(
    status: pa.Array | pa.ChunkedArray, metadata: Mapping[str, str], hash: str, since: int
) -> FileCounts:
    """The counts of a file with this column `status`, metadata, hash and `since`."""
    counted = pc.value_counts(status.cast(pa.string())).to_pylist()
    rows = {count["values"]: count["counts"] for count in counted}
    failed = sum(count for name, count in rows.items() if is_failed_status(name))
    taken_over = sum(json.loads(metadata.get(TAKEN_OVER, "{}")).values())
    return FileCounts(failed, taken_over, hash, since, rows.get(SKIPPED, 0))


def complete_counts(store: Store, keys: Iterable[str], known: Counts) -> dict[str, FileCounts]:
    """The known counts, and those of these files; a file that is not in `known` is read.

    StorageError names every file that is damaged, a line each.
    """

    def read(key: str) -> FileCounts | StorageError:
        try:
            table = read_file(store, key, ["status"])
        except UnavailableError:
            raise
        except StorageError as error:
            return error
        written = metadata_of(table)
        since = int(written.get(SINCE, 0))
        return counts_of(table.column("status"), written, written[HASH], since)

    counts, damaged = dict(known), []
    unknown = [key for key in keys if key not in known]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        for key, result in zip(unknown, pool.map(read, unknown), strict=True):
            if isinstance(result, StorageError):
                damaged.append(str(result))
            else:
                counts[key] = result
    _refuse(damaged)
    return counts


def check_unchanged(
    store: Store, number: int, files: Iterable[Mapping[str, Any]], now: Counts, done: Committed
) -> None:
    """StorageError that names each of the files of a snapshot that is another file now.

    A file of a run that began after the snapshot replaces one that somebody deleted, and is not
    meant. `now` has the counts of the current files.
    """
    lines = []
    for file in files:
        key, task, current = file["key"], file["task"], now.get(file["key"])
        if current is None:
            parts = parse_key(key)
            assert parts is not None, key
            labels = done.labels[task] if done.fp.get(task) == parts.fp else {}
            # — of the same shard, a file with a lower number counts now: its retry was deleted
            if parts.sid not in labels or parts.number <= done.retry(task, parts.sid):
                continue
            what = "it does not exist"
        elif current.hash != file["hash"] and current.since < number:
            what = f"it has the hash {current.hash} instead of {file['hash']}: it is another file"
        else:
            continue
        of = "documents" if task is None else f"answers of task {task!r}"
        published = f"{of} that snapshot {number} published: {what}"
        lines.append(f"{store.url}/{key}: {published}; {remedy(key)}")
    _refuse(lines)


def _refuse(lines: Sequence[str]) -> None:
    """StorageError with these lines, each about one file; none: no error."""
    if lines:
        more = [f"and {len(lines) - _SHOWN:,} more files"] if len(lines) > _SHOWN else []
        raise StorageError("\n".join([*lines[:_SHOWN], *more]))
