"""Counts of the files of results, and their log in `counts/`, so that no file is read for a count.

Entry points: `CountsLog`, in which a run logs the counts of what its workers commit, and `counted`,
which reads only the files that no known count is of. A count is of one object, and is found by a
hash of its key and its etag, so a file that was changed or replaced is read.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import StorageError, UnavailableError
from pipeline.ledger.keys import DOCUMENTS, counts_key, documents_key, parse_key
from pipeline.ledger.label_files import (
    HASH,
    SINCE,
    FileCounts,
    failed_rows,
    metadata_of,
    read_file,
    to_parquet,
    with_counts,
)
from pipeline.ledger.numbered import (
    CHECKPOINT,
    free_numbers,
    is_checkpoint,
    numbers,
    numbers_from_checkpoint,
    read_numbered,
)
from pipeline.sources.documents import SKIPPED
from pipeline.stores.store import Store, StoredObject

logger = logging.getLogger(__name__)

READ_THREADS = 32
# A run logs its counts this often. A driver that is killed loses those of fewer shards.
SHARDS_A_LOG = 1_000
_SHOWN = 20  # damaged files
_HASHED_ROWS = 10_000  # that are Python objects at once


COUNTED = FileCounts._fields[2:]  # what `counted` adds
OBJECT = "object"  # 128 bits of the SHA-256 of a key and an etag
# Of a large output, all counts are in memory: 70 bytes a file.
SCHEMA = pa.schema(
    [
        (OBJECT, pa.binary(16)),
        (COUNTED[0], pa.string()),
        *((name, pa.int32()) for name in COUNTED[1:]),
    ]
)


class CountsLog:
    """The log of one run: it is written each 1,000 shards, and when its block ends."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._files: list[FileCounts] = []
        self._shards = 0

    def __enter__(self) -> CountsLog:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # — the caller gets the error of the block, not one of this write: counts that are not
        # logged are computed later from the files
        with nullcontext() if error is None else suppress(StorageError):
            self._flush()

    def add(self, files: Iterable[FileCounts]) -> None:
        """Takes in the files of a shard that were created."""
        self._files += files
        self._shards += 1
        if self._shards >= SHARDS_A_LOG:
            self._flush()

    def _flush(self) -> None:
        log_counts(self._store, self._files)
        self._files, self._shards = [], 0


def log_counts(store: Store, files: Sequence[FileCounts]) -> None:
    """Appends the counts of these files to the log."""
    if not files:
        return
    new = _table_of(files)
    for number in free_numbers(store, counts_key):
        rows = pa.concat_tables([new, logged_counts(store)]) if is_checkpoint(number) else new
        if store.create(counts_key(number), to_parquet(rows, {})):
            return


def log_again(store: Store, counts: pa.Table) -> None:
    """Begins the log again, at a checkpoint that has these counts alone."""
    last = max(numbers(store, counts_key), default=0)
    store.create(counts_key(last - last % CHECKPOINT + CHECKPOINT), to_parquet(counts, {}))


def of_objects(counts: pa.Table, objects: Sequence[StoredObject]) -> pa.Table:
    """The counts of these objects."""
    hashes = [_object_hash(each.key, each.etag) for each in objects]
    return counts.filter(pc.is_in(counts[OBJECT], value_set=pa.array(hashes, pa.binary(16))))


def logged_counts(store: Store) -> pa.Table:
    """All counts in the log.

    An object of the log that is damaged is named in a warning and left out.
    """
    tables = [SCHEMA.empty_table()]
    for number, table in read_numbered(
        store, counts_key, numbers_from_checkpoint(store, counts_key)
    ):
        if isinstance(table, ValueError) or not {*SCHEMA.names} <= {*table.column_names}:
            text = "%s/%s: is damaged; files of results are read instead; delete it"
            logger.warning(text, store.url, counts_key(number))
        else:
            tables.append(table.select(SCHEMA.names).cast(SCHEMA))
    return pa.concat_tables(tables[::-1])


def counted(store: Store, files: pa.Table, *, keep: bool = False) -> pa.Table:
    """The files, with columns for their hashes and counts; those that the log lacks are read.

    `files` has the columns `key` and `etag`. With `keep`, the counts of files that are read are
    logged: so the log has those of all that was ever published. StorageError names every file that
    is damaged, a line each.
    """
    known = logged_counts(store)
    shown = with_known_counts(files, known)
    unknown = files.filter(shown[HASH].is_null())
    if not unknown.num_rows:
        return shown
    read = _read(store, unknown)
    if keep:
        log_counts(store, read)
    return with_known_counts(files, pa.concat_tables([known, _table_of(read)]))


def with_known_counts(files: pa.Table, known: pa.Table) -> pa.Table:
    """The files, with columns for their hashes and counts; null where they are not known."""
    at = pc.index_in(object_hashes(files), value_set=known[OBJECT].combine_chunks())
    for name in COUNTED:
        files = files.append_column(name, known[name].combine_chunks().take(at))
    return files


def object_hashes(files: pa.Table) -> pa.Array:  # [files]
    """The hash of each object's key and etag, by which its counts are found."""
    parts = [
        pa.array(map(_object_hash, *batch.to_pydict().values()), pa.binary(16))
        for batch in files.select(["key", "etag"]).to_batches(max_chunksize=_HASHED_ROWS)
    ]
    return pa.concat_arrays([pa.array([], pa.binary(16)), *parts])


def _object_hash(key: str, etag: str) -> bytes:
    return hashlib.sha256(f"{key}\t{etag}".encode()).digest()[:16]


def of_shards(files: pa.Table, name: str, how: str) -> int:
    """The sum over the shards of the `min` or `max` of a count over the label files of a shard."""
    by_shard = files.filter(files["task"].is_valid()).group_by("sid").aggregate([(name, how)])
    return pc.sum(by_shard[f"{name}_{how}"]).as_py() or 0


def skipped_by_all(store: Store, files: pa.Table) -> int:
    """The rows that every task of their shard skips: label files are read to count them."""
    by_shard = files.filter(files["task"].is_valid()).group_by("sid")
    shards = by_shard.aggregate([("key", "list"), ("rows", "max"), ("skipped", "min")])
    at_most = shards["skipped_min"]
    is_open = pc.and_(pc.greater(at_most, 0), pc.less(at_most, shards["rows_max"]))

    def count(keys: Sequence[str]) -> int:
        statuses = (read_file(store, key, ["status"])["status"].cast(pa.string()) for key in keys)
        is_skipped = reduce(pc.and_, (pc.equal(status, SKIPPED) for status in statuses))
        return pc.sum(is_skipped).as_py() or 0

    with ThreadPoolExecutor(READ_THREADS) as pool:
        counts = sum(pool.map(count, shards["key_list"].filter(is_open).to_pylist()))
    return counts + (pc.sum(at_most.filter(pc.invert(is_open))).as_py() or 0)


def refuse(lines: Sequence[str]) -> None:
    """StorageError with these lines, each about one file; none: no error."""
    if lines:
        more = [f"and {len(lines) - _SHOWN:,} more files"] if len(lines) > _SHOWN else []
        raise StorageError("\n".join([*lines[:_SHOWN], *more]))


def _read(store: Store, files: pa.Table) -> list[FileCounts]:
    def read(key: str, etag: str) -> FileCounts | StorageError:
        parts = parse_key(key)
        assert parts is not None, key
        is_label = parts.folder != DOCUMENTS
        try:
            table = read_file(store, key, ["status"])
            written = metadata_of(table)
            status = documents = table["status"].combine_chunks()
            if is_label and pc.any(failed_rows(status)).as_py():
                documents = read_file(store, documents_key(parts.sid), ["status"])["status"]
                documents = documents.combine_chunks()
        except UnavailableError:
            raise
        except StorageError as error:
            return error
        file = FileCounts(key, etag, written[HASH], int(written.get(SINCE, 0)))
        return with_counts(file, status, documents, written) if is_label else file

    with ThreadPoolExecutor(READ_THREADS) as pool:
        results = list(pool.map(read, files["key"].to_pylist(), files["etag"].to_pylist()))
    refuse([*dict.fromkeys(str(each) for each in results if isinstance(each, StorageError))])
    return [each for each in results if not isinstance(each, StorageError)]


def _table_of(files: Sequence[FileCounts]) -> pa.Table:
    rows = ((_object_hash(file.key, file.etag), *file[2:]) for file in files)
    arrays = [
        pa.array(column, of.type)
        for column, of in zip(zip(*rows, strict=True), SCHEMA, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)
