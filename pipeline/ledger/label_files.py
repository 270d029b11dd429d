"""The files of a shard. Entry points: `commit_shard` writes them, `read_file` reads one.

The files are built in memory and read back before the first is created, so an object that exists
is whole. Its existence is the record that the shard is done.

A file's metadata has a hash of the file and its key, so a file that was changed or moved afterwards
is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import StorageError, UnavailableError
from pipeline.hashes import canonical_json, sha256_hex
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS
from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.keys import RETRIES, documents_key, label_key
from pipeline.sources.documents import OK, SKIPPED, is_failed_status
from pipeline.sources.shards import Shard
from pipeline.stores.store import Store

logger = logging.getLogger(__name__)

METADATA_PREFIX = "assay."
HASH_DIGITS = 16
# The value of `assay.hash` is this and the digits: the SHA-256 of the file with zeros in their
# place. It is the last of our metadata, which are behind the rows and the names of columns.
_SEAL, _ZEROS = b"assay-sha256:", b"0" * HASH_DIGITS
# Metadata: see `read_file` and `commit_shard`.
HASH, KEY, SINCE = "hash", "key", "since"
TAKEN_OVER = "taken_over"  # the number of rows with the answers of other shards
_ENCODED = ("label", "status")  # columns of few values, which are stored as dictionaries


@dataclass(frozen=True, slots=True)
class LabelFile:
    """One task's rows for one shard, and the metadata of their file."""

    task: str
    fp: str
    sid: str
    rows: pa.StructArray  # [docs]
    metadata: Mapping[str, str]
    retry: int = 0  # the number of the retry; 0: the first try

    @property
    def key(self) -> str:
        return label_key(self.task, self.fp, self.sid, self.retry)


class FileCounts(NamedTuple):
    """The counts of one file, and which object they are of. A documents file has no counts."""

    key: str
    etag: str
    hash: str
    since: int  # the number of the last snapshot when the run that made the file began
    failed: int | None = None  # rows that should have an answer and have none
    to_retry: int | None = None  # of these, rows whose text can be asked about again
    skipped: int | None = None  # rows that the question is not asked about
    taken_over: int | None = None  # rows with the answers of other shards


def documents_table(documents: pa.Table) -> pa.Table:
    """The rows of a documents file: the documents without their texts."""
    return _encoded(documents.select(DOCUMENTS_FILE_COLUMNS))


def to_parquet(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """The table as a Parquet file, with the metadata and the file's hash under `assay.*` keys."""
    described = {f"{METADATA_PREFIX}{key}": value for key, value in metadata.items()}
    sink, described_table = pa.BufferOutputStream(), table.replace_schema_metadata(described)
    with pq.ParquetWriter(sink, described_table.schema, compression="zstd") as writer:
        writer.write_table(described_table)
        # — not in the schema, whose metadata Arrow stores a second time, as base64; all of it is
        # added here, so that the hash comes after texts of users
        hash = {f"{METADATA_PREFIX}{HASH}": (_SEAL + _ZEROS).decode()}
        writer.add_key_value_metadata({**described, **hash})
    data: bytes = sink.getvalue().to_pybytes()
    at = data.rfind(_SEAL) + len(_SEAL)
    return data[:at] + sha256_hex(data, HASH_DIGITS).encode() + data[at + HASH_DIGITS :]


def sealed_hash(data: bytes) -> str | None:
    """The hash in a file's metadata; None if the file is not as `to_parquet` made it."""
    start = data.rfind(_SEAL) + len(_SEAL)
    end = start + HASH_DIGITS
    digits = sha256_hex(data[:start] + _ZEROS + data[end:], HASH_DIGITS)
    return digits if data[start:end] == digits.encode() else None


def table_in(data: bytes) -> pa.Table:
    """The table that `to_parquet` wrote; ValueError if the file is not as it was made."""
    try:
        if sealed_hash(data) is None:
            raise ValueError("its content does not match its hash")
        return pq.read_table(pa.BufferReader(data), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error)) from error


def verify(data: bytes, doc_ids: pa.ChunkedArray) -> None:
    """StorageError unless the file reads back with these rows in this order."""
    try:
        table = pq.read_table(pa.BufferReader(data), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"a file just built cannot be read back: {error}") from error
    if not table.column("doc_id").equals(doc_ids):
        raise StorageError(
            f"a file just built has {table.num_rows} rows, which are not the {len(doc_ids)} "
            f"documents of the shard in order; nothing was committed, run again"
        )


def remedy(key: str) -> str:
    """What to do about a damaged or missing file of results."""
    command = "assay run --retry-failed" if key.startswith(RETRIES) else "assay run"
    return f"restore it from a copy, or delete this file, then `{command}` makes it again"


def read_file(
    store: Store, key: str, columns: Sequence[str] | None, *, published: str | None = None
) -> pa.Table:
    """These columns of a file in this order, or all of them, with its hash in the metadata.

    StorageError, with the key and what to do, if the file cannot be read, is not as it was written
    under this key, or has another hash than the one that a snapshot `published`.
    """
    try:
        data = store.read(key)
        sealed = sealed_hash(data)
        if sealed is None:
            raise StorageError("its content was changed after it was written")
        table = pq.read_table(pa.BufferReader(data), columns=columns, use_threads=False)
        table = table if columns is None else table.select(columns)
    except UnavailableError:
        raise
    except (pa.ArrowException, OSError, KeyError, StorageError) as error:
        reason = " ".join(str(error).split()).removeprefix(f"{store.url}/{key}: ")
        raise StorageError(f"{store.url}/{key}: {reason}; {remedy(key)}") from error
    written = metadata_of(table).get(KEY, key)
    if written != key or published not in (None, sealed):
        other = f"has the hash {sealed} and was published with {published}: it is another file"
        difference = other if written == key else f"is the file {written}, under another key"
        raise StorageError(f"{store.url}/{key}: {difference}; {remedy(key)}")
    hashed = {**(table.schema.metadata or {}), f"{METADATA_PREFIX}{HASH}": sealed}
    return table.replace_schema_metadata(hashed)


def read_source(store: Store, key: str, columns: Sequence[str] | None = None) -> pa.Table | None:
    """`read_file` of a file that only saves work: None, with a warning, for a StorageError.

    UnavailableError if the store does not answer.
    """
    try:
        return read_file(store, key, columns)
    except UnavailableError:
        raise
    except StorageError as error:
        logger.warning("%s; no answer is taken from it", error)
        return None


def metadata_of(table: pa.Table) -> dict[str, str]:
    """The metadata that `to_parquet` wrote, and from `read_file` the hash."""
    stored = (table.schema.metadata or {}).items()
    named = ((name.decode(), value.decode("utf-8", "backslashreplace")) for name, value in stored)
    return {name.removeprefix(METADATA_PREFIX): value for name, value in named}


def with_counts(
    file: FileCounts, status: pa.Array, documents_status: pa.Array, metadata: Mapping[str, str]
) -> FileCounts:
    """A label file with its counts, from its column `status` and that of its documents file."""
    is_failed, of_documents = failed_rows(status), documents_status.cast(pa.string())
    is_open = pc.and_(is_failed, pc.equal(of_documents, OK))
    masks = is_failed, is_open, pc.equal(status.cast(pa.string()), SKIPPED)
    failed, to_retry, skipped = (pc.sum(mask).as_py() or 0 for mask in masks)
    taken_over = int(metadata.get(TAKEN_OVER, 0))
    return FileCounts(*file[:4], failed, to_retry, skipped, taken_over)


def failed_rows(status: pa.Array) -> pa.BooleanArray:  # [rows]
    """Whether a row should have an answer and has none."""
    values = status.cast(pa.string())
    reasons = [name for name in pc.unique(values).to_pylist() if is_failed_status(name)]
    return pc.is_in(values, value_set=pa.array(reasons, pa.string()))


def commit_shard(
    store: Store,
    shard: Shard,
    documents: pa.Table,
    label_files: Sequence[LabelFile],
    *,
    has_documents: bool = False,
    since: int = 0,
) -> list[FileCounts]:
    """Creates the shard's documents file and its label files; the counts of the new ones.

    Existing files stay. Every file is built and read back before the first is created, so a shard
    with wrong rows leaves no file. With `has_documents`, the shard has a documents file with these
    documents. `since` is the number of the output's last snapshot when the run began: the files
    replace what that snapshot published under their keys. StorageError if the documents are not the
    shard's rows, or not those of its documents file.
    """
    for rows in (documents.num_rows, *(len(f.rows) - f.rows.null_count for f in label_files)):
        if rows != shard.rows:
            raise StorageError(
                f"{shard.path}: {rows} rows for a shard of {shard.rows} rows; nothing was "
                f"committed, run again"
            )
    documents_file, ids = documents_key(shard.id), documents.column("doc_id")
    place = canonical_json(shard.to_json()).decode()
    origin = {KEY: documents_file, SINCE: str(since), "shard": place}
    built = {}
    if not has_documents:
        built[documents_file] = to_parquet(documents_table(documents), origin)
    for file in label_files:
        metadata = {**file.metadata, **origin, KEY: file.key}
        built[file.key] = to_parquet(_label_table(file, ids), metadata)
    for data in built.values():
        verify(data, ids)
    made, by_key = [], {file.key: file for file in label_files}
    for number, (key, data) in enumerate(built.items(), start=has_documents):
        failpoint(f"create {number}")
        if (etag := store.create(key, data)) is not None:
            counts = FileCounts(key, etag, str(sealed_hash(data)), since)
            if (of := by_key.get(key)) is not None:
                status = documents["status"].combine_chunks()
                counts = with_counts(counts, of.rows.field("status"), status, of.metadata)
            made.append(counts)
        elif key == documents_file and not read_file(store, key, ["doc_id"])["doc_id"].equals(ids):
            raise StorageError(
                f"{store.url}/{key}: has other documents than {shard.path}, so no labels were "
                f"committed; restore the input, or delete this file and its shard's label files"
            )
    failpoint("created")
    return made


def _label_table(file: LabelFile, ids: pa.ChunkedArray) -> pa.Table:
    names = [field.name for field in file.rows.type]
    return _encoded(pa.Table.from_arrays([ids, *file.rows.flatten()], names=["doc_id", *names]))


def _encoded(table: pa.Table) -> pa.Table:
    for name in (name for name in _ENCODED if name in table.column_names):
        values = table.column(name).cast(pa.string()).combine_chunks().dictionary_encode()
        table = table.set_column(table.column_names.index(name), name, values)
    return table
