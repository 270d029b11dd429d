"""Whether an output is intact: everything that its current snapshot names, read again.

Entry point: `verify_output`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import computed_field

from pipeline.errors import SpecError, StorageError, UnavailableError
from pipeline.hashes import parse_json, sha256_hex
from pipeline.integrity.certified import wrong_certificates
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS
from pipeline.ledger.keys import CASCADES, parse_key, spec_key
from pipeline.ledger.label_files import metadata_of, read_file, remedy
from pipeline.ledger.snapshot_files import NamedFile, NamedShard
from pipeline.ledger.snapshots import Contents, SnapshotTask, contents, last_snapshot
from pipeline.sources.shards import Shard
from pipeline.sources.source import InputObject, find_objects, read_documents
from pipeline.sources.streams import Options
from pipeline.spec.schema import Columns, JobSpec
from pipeline.stores.store import Store, open_store

THREADS = 8
WINDOW_SHARDS = 1_000  # that are in memory at once


@dataclass(frozen=True, slots=True)
class Damage:
    """An object that differs from what was published."""

    key: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what}; {self.fix}"


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What was read again, and the damages."""

    output: str
    snapshot: int
    spec: str  # the snapshot's
    shards: int
    files: int
    rows: int
    cells: int
    documents_read_again: int
    inputs_changed: int  # input files that are gone or have another version, so are not compared
    damages: tuple[Damage, ...]

    @computed_field
    @property
    def intact(self) -> bool:
        return not self.damages


@dataclass(frozen=True, slots=True)
class _Audit:
    """What shards are compared with."""

    store: Store
    tasks: Mapping[str, SnapshotTask]
    inputs: Mapping[str, list[InputObject]]  # the objects that are there now, by path
    options: Options  # of the input


@dataclass(frozen=True, slots=True)
class _CheckedShard:
    """The result for one shard."""

    damages: tuple[Damage, ...]
    read_again: int = 0
    changed: str | None = None  # the input path, if the object is not the version that was cut


def verify_output(spec: JobSpec, *, cache_dir: Path) -> VerifyResult:
    """The spec's last snapshot read again in full; the current one if the spec has none."""
    store = open_store(spec.output, spec.storage_options)
    snapshot = contents(store, last_snapshot(store, spec.name))
    return verify(store, snapshot, cache_dir, spec.input.storage_options)


def verify(store: Store, snapshot: Contents, cache_dir: Path, options: Options) -> VerifyResult:
    """One snapshot read again; `options` are the input's storage options."""
    # — once for each file: a file may have many shards
    paths = snapshot.files["path"].unique().to_pylist()
    with ThreadPoolExecutor(THREADS) as pool:
        find = partial(find_objects, cache_dir=cache_dir, options=options, output=store.url)
        inputs = dict(zip(paths, pool.map(partial(_objects_at, find), paths), strict=True))
        audit = _Audit(store, snapshot.tasks, inputs, options)
        shards, checked = iter(snapshot.shards), list[_CheckedShard]()
        while window := list(islice(shards, WINDOW_SHARDS)):
            checked += pool.map(partial(_check_shard, audit), window)
    return VerifyResult(
        output=store.url,
        snapshot=snapshot.number,
        spec=snapshot.spec,
        shards=len(snapshot.shards),
        files=snapshot.files.num_rows,
        rows=snapshot.rows,
        cells=snapshot.rows * len(snapshot.tasks),
        documents_read_again=sum(result.read_again for result in checked),
        inputs_changed=len({result.changed for result in checked if result.changed}),
        damages=tuple(
            chain(
                _damaged_specs(store, snapshot.tasks),
                _wrong_certificates(store, snapshot),
                *(result.damages for result in checked),
            )
        ),
    )


def _objects_at(find: Callable[[str], list[InputObject]], path: str) -> list[InputObject]:
    """The input objects that a path names; none if the file is gone."""
    try:
        return find(path)
    except SpecError as error:
        if all(problem.place == "input.path" for problem in error.problems):
            return []
        raise


def _damaged_specs(store: Store, tasks: Mapping[str, SnapshotTask]) -> Iterator[Damage]:
    fix = "restore it from a copy, or from the metadata `assay.spec` of the task's label files"
    for name, task in tasks.items():
        key = spec_key(name, task.fp)
        try:
            hashed = sha256_hex(store.read(key), 16)
        except UnavailableError:
            raise
        except StorageError as error:
            yield Damage(key, f"cannot be read ({error})", fix)
            continue
        if hashed != task.fp:
            yield Damage(key, f"its content hashes to {hashed}: its content was changed", fix)


def _wrong_certificates(store: Store, snapshot: Contents) -> Iterator[Damage]:
    for task, what in wrong_certificates(store, snapshot):
        fix = f"delete {CASCADES}{task}/, then `assay run` proves the promise again"
        yield Damage(f"the certificate of {task}", what, fix)


def _check_shard(audit: _Audit, shard: NamedShard) -> _CheckedShard:
    """The files of one shard, compared with each other and with the input."""
    damages: list[Damage] = []
    documents = _checked(audit, shard, None, damages)
    for task in shard.labels:
        answers = _checked(audit, shard, task, damages)
        if answers is None or documents is None:
            continue
        if where := _differing(answers.column("doc_id"), documents.column("doc_id")):
            what = f"doc_id is not in the order of {shard.documents.key}: {where}"
            damages.append(_damage(shard.labels[task], what))
    origin = None if documents is None else _shard_in(documents)
    if documents is None or origin is None or shard.sid != origin.id:
        return _CheckedShard(tuple(damages))
    version = origin.version
    columns = Columns(version.text_column, version.id_column, version.image_column, version.quoted)
    own = replace(version, view=None)  # — of a table's data file, which stays the same
    if all(item.version(columns) != own for item in audit.inputs[shard.path]):
        return _CheckedShard(tuple(damages), changed=shard.path)
    compared = ["doc_id", "content_hash"]
    read = read_documents(origin, audit.options)
    again = pa.concat_tables(part.select(compared) for part in read)
    for column in compared:
        if where := _differing(documents.column(column), again.column(column)):
            what = f"{column} differs from {shard.path}, from row {shard.start_row}: {where}"
            damages.append(_damage(shard.documents, what))
    return _CheckedShard(tuple(damages), read_again=shard.rows)


def _damage(file: NamedFile, what: str) -> Damage:
    return Damage(file.key, what, remedy(file.key))


def _checked(
    audit: _Audit, shard: NamedShard, task: str | None, damages: list[Damage]
) -> pa.Table | None:
    """The rows of the shard's documents file, or of the task's label file; None if it is damaged.

    Its damages are appended to `damages`.
    """
    version = None if task is None else audit.tasks[task]
    file = shard.documents if task is None else shard.labels[task]
    columns = DOCUMENTS_FILE_COLUMNS if version is None else ("doc_id", *version.columns)
    fp = None if version is None else version.fp
    try:
        table = read_file(audit.store, file.key, None, published=file.hash).select(columns)
    except UnavailableError:
        raise
    except (StorageError, KeyError) as error:
        what = str(error).removeprefix(f"{audit.store.url}/{file.key}: ")
        damages.append(_damage(file, what.removesuffix(f"; {remedy(file.key)}")))
        return None
    if table.num_rows != shard.rows:
        what = f"has {table.num_rows} rows; {shard.rows} were published"
        damages.append(_damage(file, what))
    key, metadata, origin = parse_key(file.key), metadata_of(table), _shard_in(table)
    if key is None or (key.task, key.fp, key.sid) != (task or "", fp or "", shard.sid):
        damages.append(_damage(file, f"is not a key of shard {shard.sid}"))
    for name, found, expected in (
        ("task", metadata.get("task"), task),
        ("fp", metadata.get("fp"), fp),
        ("shard", origin and origin.id, shard.sid),
    ):
        if found != expected:
            what = f"its metadata says {name} {found!r}, and its key says {expected!r}"
            damages.append(_damage(file, what))
    return table


def _differing(column: pa.ChunkedArray, published: pa.ChunkedArray) -> str | None:
    """Where two columns differ, or None."""
    if len(column) != len(published):
        return f"{len(column)} rows instead of {len(published)}"
    if column.equals(published):
        return None
    rows = pc.indices_nonzero(pc.fill_null(pc.not_equal(column, published), True))
    return f"differs in row {rows[0]}" + (f" and {len(rows) - 1} more" if len(rows) > 1 else "")


def _shard_in(table: pa.Table) -> Shard | None:
    """The shard of a file of results, by its metadata; None if these name none."""
    try:
        return Shard.from_json(parse_json(metadata_of(table)["shard"]))
    except (ValueError, KeyError, TypeError):
        return None
