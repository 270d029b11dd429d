"""Snapshots: numbered, consistent views of finished work. The highest number is current.

A snapshot is a header in JSON and a table of files in Parquet. Entry points: `publish` writes one,
and `contents` reads one.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import StorageError, UnavailableError
from pipeline.fitted.certificate import Certificate
from pipeline.hashes import canonical_json, parse_sealed_json, sealed_json, short_hash, validated
from pipeline.ledger.cells import Committed, is_whole
from pipeline.ledger.columns import ANSWER_COLUMNS
from pipeline.ledger.counts_log import COUNTED, counted, refuse
from pipeline.ledger.keys import RETRIES, manifest_key, parse_key, snapshot_key
from pipeline.ledger.label_files import remedy
from pipeline.ledger.numbered import free_numbers, numbers
from pipeline.ledger.snapshot_files import GROUP_SHARDS, PLACED, Shards, files_of
from pipeline.sources.shards import Shard
from pipeline.stores.store import Store


@dataclass(frozen=True, slots=True)
class SnapshotTask:
    """A task in a snapshot: its version, its labels in order, and its files' columns."""

    fp: str
    labels: tuple[str, ...]
    columns: tuple[str, ...] = ANSWER_COLUMNS


@dataclass(frozen=True, slots=True)
class Contents:
    """A snapshot: its tasks, and its files, shard by shard in the input's order."""

    number: int
    spec: str
    tasks: Mapping[str, SnapshotTask]
    files: pa.Table = field(repr=False)
    missing_rows: int = 0  # of a partial snapshot: documents of the input without answers
    missing_files: int = 0  # of a partial snapshot: input files whose rows are not counted
    created_at: str = field(default="", compare=False)  # ISO 8601; "" if it is not published
    limit: str | None = None  # the condition of the run: the other documents have no answers
    asked: int = 0  # documents that a task was asked about; without a condition, all
    certificates: Mapping[str, Certificate] = field(default_factory=dict)  # by task with a cascade

    @property
    def shards(self) -> Shards:
        """The shards, with their files."""
        return Shards(self.files, 1 + len(self.tasks))

    @property
    def rows(self) -> int:
        """The number of documents."""
        return pc.sum(self.files["rows"].filter(self.files["task"].is_null())).as_py() or 0


def publish(
    store: Store,
    spec_name: str,
    tasks: Mapping[str, SnapshotTask],
    shards: Sequence[Shard],
    done: Committed,
    *,
    created_at: str,
    missing_files: int = 0,
    limit: str | None = None,
    asked: int | None = None,
    certificates: Mapping[str, Certificate] = MappingProxyType({}),
) -> int:
    """The number of the snapshot of this work: a new one, unless the spec's last is the same.

    Incomplete shards are left out, and their rows are counted. `missing_files` is the number of
    input files whose rows cannot be counted. With `limit`, the condition of a run, a snapshot is
    never complete, and `asked` documents were asked about. StorageError if a file is not as it was
    written, or as the spec's last snapshot published it: each such file is named, with what to do.
    """
    complete = [shard for shard in shards if is_whole(shard, tasks, done)]
    has_all = len(complete) == len(shards) and not missing_files
    rows = sum(shard.rows for shard in complete)
    header: dict[str, Any] = {
        "complete": has_all and limit is None,
        "missing_files": missing_files,
        "missing_rows": sum(shard.rows for shard in shards) - rows,
        "rows": rows,
        "spec": spec_name,
        "tasks": {name: asdict(task) for name, task in tasks.items()},
        **({} if limit is None else {"limit": limit}),
        **(
            {"certificates": {t: asdict(c) for t, c in certificates.items()}}
            if certificates
            else {}
        ),
    }
    files = files_of(complete, tasks, done)
    header["content_hash"] = _content_hash(header, files)
    for number in free_numbers(store, snapshot_key):
        last = next(headers(store, spec_name, skip_damaged=True), None)
        if last is not None and last.get("content_hash") == header["content_hash"]:
            table_of(store, last)  # — a damaged one is named
            return int(last["number"])
        shown = counted(store, files, keep=True)
        if last is not None:
            _check_unchanged(store, int(last["number"]), table_of(store, last), shown, done)
        content = header | {"created_at": created_at, "number": number}
        if limit is not None:
            content["asked"] = asked
        if _create(store, content, shown, 1 + len(tasks)):
            break
    return number


def contents(store: Store, number: int | None = None) -> Contents:
    """Snapshot `number`, or the current one; StorageError if there is none or it is invalid."""
    existing = snapshot_numbers(store) if number is None else [number]
    if not existing:
        raise StorageError(
            f"{store.url}: has no snapshot yet; `assay run` publishes one when its work is complete"
        )
    content = read_snapshot(store, existing[0])
    with _parsing(store, existing[0]):
        return Contents(
            number=int(content["number"]),
            spec=str(content["spec"]),
            tasks={name: validated(SnapshotTask, of) for name, of in content["tasks"].items()},
            files=table_of(store, content),
            # — with the documents that were not asked about, which have no answers in it
            missing_rows=content["missing_rows"] + content["rows"] - asked_of(content),
            missing_files=int(content["missing_files"]),
            created_at=str(content["created_at"]),
            limit=content.get("limit"),
            asked=asked_of(content),
            certificates={
                task: validated(Certificate, own)
                for task, own in content.get("certificates", {}).items()
            },
        )


def asked_of(snapshot: Mapping[str, Any]) -> int:
    """The number of documents of a snapshot that were asked about, from its header."""
    return int(snapshot.get("asked", snapshot["rows"]))


def read_snapshot(store: Store, number: int) -> dict[str, Any]:
    """The header of one snapshot."""
    return _parsed(store, number, store.read(snapshot_key(number)))


def snapshot_numbers(store: Store) -> list[int]:
    """The numbers of all snapshots, the current one first."""
    return numbers(store, snapshot_key)[::-1]


def headers(
    store: Store, spec_name: str | None = None, *, skip_damaged: bool = False
) -> Iterator[dict[str, Any]]:
    """The headers of the spec's snapshots, the last one first; for no spec, of all.

    StorageError if one is cut off, so that its spec is not known; or it is skipped.
    """
    for number in snapshot_numbers(store):
        data = store.read(snapshot_key(number))
        with suppress(StorageError) if skip_damaged else nullcontext():
            header = _parsed(store, number, data)
            if spec_name in (None, header.get("spec")):
                yield header


def last_snapshot(store: Store, spec_name: str) -> int | None:
    """The number of the spec's last snapshot, or None."""
    return next((int(header["number"]) for header in headers(store, spec_name)), None)


def last_contents(store: Store, spec_name: str) -> Contents:
    """The spec's last snapshot; the current one may be of another spec."""
    if (number := last_snapshot(store, spec_name)) is None:
        raise StorageError(
            f"{store.url}: has no snapshot of {spec_name} yet; `assay run` publishes one"
        )
    return contents(store, number)


def last_shards(store: Store, spec_name: str | None) -> frozenset[str]:
    """The ids of the shards of the spec's last snapshot, or, for no spec, of the last of any."""
    last = next(headers(store, spec_name, skip_damaged=True), None)
    return frozenset(() if last is None else table_of(store, last)["sid"].unique().to_pylist())


def table_of(store: Store, snapshot: Mapping[str, Any]) -> pa.Table:
    """The files that a snapshot names; StorageError if its table is damaged."""
    with _parsing(store, snapshot.get("number", 0)):
        try:
            data = store.read(snapshot["files"])
        except UnavailableError:
            raise
        except StorageError as error:
            raise ValueError(f"the table of its files is not there: {error}") from error
        if short_hash(data) != snapshot["files_hash"]:
            raise ValueError(f"{snapshot['files']} does not match its hash")
        files = pq.read_table(pa.BufferReader(data), use_threads=False)
        return files.select([*PLACED.names, *COUNTED])


def _parsed(store: Store, number: int, data: bytes) -> dict[str, Any]:
    with _parsing(store, number):
        if (snapshot := parse_sealed_json(data))["number"] != number:
            raise ValueError(f"it is snapshot {snapshot['number']}, under another key")
        return snapshot


@contextmanager
def _parsing(store: Store, number: int) -> Iterator[None]:
    """Raises a StorageError for a snapshot that lacks a field or has a wrong one."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise StorageError(
            f"{store.url}/{snapshot_key(number)}: is not a snapshot: {error!r}; "
            f"restore it from a copy, or delete it: `assay run` publishes the work that is there"
        ) from error


def _content_hash(header: Mapping[str, Any], files: pa.Table) -> str:
    """A hash that is equal for two snapshots exactly if they show the same work and objects."""
    digest = hashlib.sha256(canonical_json(header))
    for batch in files.select(["key", "etag"]).to_batches(max_chunksize=GROUP_SHARDS):
        digest.update(
            "\n".join(pc.binary_join_element_wise(*batch.columns, "\t").to_pylist()).encode()
        )
    return digest.hexdigest()[:32]


def _check_unchanged(
    store: Store, number: int, was: pa.Table, now: pa.Table, done: Committed
) -> None:
    """StorageError that names each of the files of a snapshot that is another file now.

    A file of a run that began after the snapshot replaces one that somebody deleted, and is no
    error. `now` has the current files with their counts.
    """
    at = pc.index_in(was["key"], value_set=now["key"].combine_chunks())
    current = now.select(["hash", "since"]).take(at)
    other = pc.and_(pc.not_equal(was["hash"], current["hash"]), pc.less(current["since"], number))
    lines = []
    for file, hash in zip(
        was.filter(other).to_pylist(), current["hash"].filter(other).to_pylist(), strict=True
    ):
        difference = f"it has the hash {hash} instead of {file['hash']}: it is another file"
        lines.append(_changed(store, number, file, difference))
    missing = was.filter(pc.and_(at.is_null(), pc.starts_with(was["key"], RETRIES)))
    for file in missing.to_pylist():
        key, task = parse_key(file["key"]), file["task"]
        assert key is not None, file
        labels = done.labels[task] if done.fp.get(task) == key.fp else {}
        # — of the same shard, a file with a lower number counts now: its retry was deleted
        if key.sid in labels and key.number > done.retry(task, key.sid):
            lines.append(_changed(store, number, file, "it does not exist"))
    refuse(lines)


def _changed(store: Store, number: int, file: Mapping[str, Any], difference: str) -> str:
    """What is wrong with a file that a snapshot published, and what to do."""
    of = "documents" if file["task"] is None else f"answers of task {file['task']!r}"
    published = f"{of} that snapshot {number} published: {difference}"
    return f"{store.url}/{file['key']}: {published}; {remedy(file['key'])}"


def _create(store: Store, content: dict[str, Any], files: pa.Table, width: int) -> bool:
    """Creates the table of files, then the header; False if the number is taken."""
    number, buffer = content["number"], io.BytesIO()
    pq.write_table(
        files,
        buffer,
        row_group_size=GROUP_SHARDS * width,
        compression="zstd",
        use_dictionary=["sid", "task", "path"],
    )
    data = buffer.getvalue()
    content |= {"files": manifest_key(number), "files_hash": short_hash(data)}
    if not store.create(content["files"], data):
        return False
    return store.create(snapshot_key(number), sealed_json(content)) is not None
