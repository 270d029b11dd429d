"""Whether a finished output is what it says: everything that its snapshot names, read again.

Knows keys, etags, metadata and how files of a shard belong together. Knows nothing of models, of
Ray, or of how findings are shown; what holds for rows is in `invariants`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.audit.invariants import broken_answers, broken_documents, differing
from pipeline.errors import SpecError, StorageError, UnavailableError
from pipeline.hashes import sha256_hex
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS
from pipeline.ledger.contents import Contents, NamedFile, NamedShard, change_of, contents, etags_now
from pipeline.ledger.keys import documents_key, label_key, parse_key, spec_key
from pipeline.ledger.label_files import METADATA_PREFIX
from pipeline.ledger.snapshots import SnapshotTask
from pipeline.sources.shards import ObjectVersion, Shard
from pipeline.sources.source import find_objects, read_documents
from pipeline.sources.streams import Options
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, open_store

THREADS = 8
MAKE_AGAIN = "restore it from a copy, or delete it and `assay run` makes it again"


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as it was published."""

    key: str
    what: str
    fix: str = MAKE_AGAIN

    def __str__(self) -> str:
        return f"{self.key}: {self.what}; {self.fix}"


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What was read again, and what is wrong with it."""

    output: str
    snapshot: int
    spec: str  # the snapshot's
    shards: int
    files: int
    rows: int
    cells: int
    documents_read_again: int
    inputs_changed: int  # objects that are gone or another version: there is nothing to compare
    damages: tuple[Damage, ...]

    @property
    def intact(self) -> bool:
        return not self.damages


@dataclass(frozen=True, slots=True)
class _Seen:
    """One shard's part of it."""

    damages: tuple[Damage, ...]
    read_again: int = 0
    changed: str | None = None  # the input object's path, where it is not the one that was cut


def verify_output(spec: JobSpec, *, cache_dir: Path) -> VerifyResult:
    """The spec's output, its current snapshot read again in full."""
    store = open_store(spec.output, spec.storage_options)
    return verify(store, contents(store), cache_dir, spec.input.storage_options)


def verify(store: Store, found: Contents, cache_dir: Path, options: Options) -> VerifyResult:
    """One snapshot read again; `options` open the input."""
    etags = etags_now(store, found.files)
    inputs = _Inputs(cache_dir, options)
    look = partial(_look, store, found.tasks, etags, inputs)
    with ThreadPoolExecutor(THREADS) as pool:
        seen = list(pool.map(look, found.shards))
    return VerifyResult(
        output=store.url,
        snapshot=found.number,
        spec=found.spec,
        shards=len(found.shards),
        files=sum(1 for _ in found.files),
        rows=found.rows,
        cells=found.rows * len(found.tasks),
        documents_read_again=sum(each.read_again for each in seen),
        inputs_changed=len({each.changed for each in seen if each.changed}),
        damages=(
            *_damaged_specs(store, found.tasks),
            *(damage for each in seen for damage in each.damages),
        ),
    )


class _Inputs:
    """The input as it is now, against what was cut of it."""

    def __init__(self, cache_dir: Path, options: Options) -> None:
        self._cache_dir, self._options = cache_dir, options

    def has(self, version: ObjectVersion) -> bool:
        """Whether the object is still the one that was cut."""
        try:
            objects = find_objects(version.path, self._cache_dir, self._options)
        except SpecError as error:
            if all(problem.place == "input.path" for problem in error.problems):
                return False  # no such file
            raise
        columns = version.text_column, version.id_column
        return any(found.version(*columns) == version for found in objects)

    def read(self, shard: Shard) -> pa.Table:
        """The ids and hashes of the shard's documents, from the input itself."""
        slices = read_documents(shard, self._options)
        return pa.concat_tables(each.select(["doc_id", "content_hash"]) for each in slices)


def _damaged_specs(store: Store, tasks: Mapping[str, SnapshotTask]) -> Iterator[Damage]:
    for name, task in tasks.items():
        key = spec_key(name, task.fp)
        fix = "restore it from a copy, or from the metadata `assay.spec` of the task's label files"
        data = _read(store, key)
        if isinstance(data, Damage):
            yield Damage(key, data.what, fix)
        elif (hashed := sha256_hex(data, 16)) != task.fp:
            yield Damage(key, f"its content hashes to {hashed}: its words were changed", fix)


def _look(
    store: Store,
    tasks: Mapping[str, SnapshotTask],
    etags: Mapping[str, str],
    inputs: _Inputs,
    shard: NamedShard,
) -> _Seen:
    """One shard's files, against each other and against the input."""
    damages: list[Damage] = []
    documents = _checked(store, shard, shard.documents, None, etags, damages)
    for name, file in shard.labels.items():
        answers = _checked(store, shard, file, tasks[name], etags, damages)
        if answers is None or documents is None:
            continue
        if where := differing(answers.column("doc_id"), documents.column("doc_id")):
            what = f"doc_id is not that of {shard.documents.key} in order: {where}"
            damages.append(Damage(file.key, what))
    origin = None if documents is None else _origin(documents)
    if documents is None or origin is None or origin.id != shard.sid:
        return _Seen(tuple(damages))
    if not inputs.has(origin.version):
        return _Seen(tuple(damages), changed=shard.path)
    damages += _against_input(shard, documents, inputs.read(origin))
    return _Seen(tuple(damages), read_again=shard.rows)


def _against_input(shard: NamedShard, documents: pa.Table, again: pa.Table) -> Iterator[Damage]:
    for column in ("doc_id", "content_hash"):
        if where := differing(documents.column(column), again.column(column)):
            what = f"{column} is not that of {shard.path} from row {shard.start_row}: {where}"
            yield Damage(shard.documents.key, what)


def _checked(
    store: Store,
    shard: NamedShard,
    file: NamedFile,
    task: SnapshotTask | None,
    etags: Mapping[str, str],
    damages: list[Damage],
) -> pa.Table | None:
    """The file's rows, what is wrong with it being added to `damages`; None: it cannot be read."""
    if change := change_of(file, etags):
        damages.append(Damage(file.key, change))
        if file.key not in etags:
            return None
    columns = DOCUMENTS_FILE_COLUMNS if task is None else ("doc_id", *task.columns)
    table = _table(store, file.key, columns)
    if isinstance(table, Damage):
        damages.append(table)
        return None
    if not file.rows == shard.rows == table.num_rows:
        what = f"has {table.num_rows} rows where {file.rows} of {shard.rows} were published"
        damages.append(Damage(file.key, what))
    broken = broken_documents(table) if task is None else broken_answers(table, task.labels)
    damages += [Damage(file.key, what) for what in (*_misplaced(file, task, shard, table), *broken)]
    return table


def _misplaced(
    file: NamedFile, task: SnapshotTask | None, shard: NamedShard, table: pa.Table
) -> Iterator[str]:
    """Where the file's key or its own words say that it is another's."""
    fp = None if task is None else task.fp
    if file.key not in _keys(file, fp):
        yield f"is not where the files of shard {shard.sid} are"
    if file.task is not None:
        for name, wanted in (("task", file.task), ("fp", fp)):
            if (said := _metadata(table, name)) != wanted:
                yield f"says of itself that its {name} is {said!r}, and lies where {wanted!r} is"
    origin = _origin(table)
    said = origin.id if origin else None
    if said != shard.sid:
        yield f"says of itself that its shard is {said!r}, and lies where {shard.sid!r} is"
    elif origin and (origin.path, origin.piece.start_row) != (shard.path, shard.start_row):
        yield f"is of {origin.path} from row {origin.piece.start_row}, not of {shard.path}"


def _keys(file: NamedFile, fp: str | None) -> Sequence[str]:
    """Where the file may be."""
    if file.task is None or fp is None:
        return [documents_key(file.sid)]
    key = parse_key(file.key)
    return [label_key(file.task, fp, file.sid, key.number if key else 0)]


def _origin(table: pa.Table) -> Shard | None:
    """The shard that a file says it is of."""
    try:
        return Shard.from_json(json.loads(_metadata(table, "shard") or ""))
    except (ValueError, KeyError, TypeError):
        return None


def _metadata(table: pa.Table, name: str) -> str | None:
    found = (table.schema.metadata or {}).get(f"{METADATA_PREFIX}{name}".encode())
    return None if found is None else found.decode("utf-8", "backslashreplace")


def _table(store: Store, key: str, columns: Sequence[str]) -> pa.Table | Damage:
    data = _read(store, key)
    if isinstance(data, Damage):
        return data
    try:
        table = pq.read_table(pa.BufferReader(data), use_threads=False)
        return table.select(list(columns))
    except (pa.ArrowException, OSError, KeyError) as error:
        return Damage(key, f"is not a file of assay: {' '.join(str(error).split())}")


def _read(store: Store, key: str) -> bytes | Damage:
    try:
        return store.read(key)
    except UnavailableError:
        raise
    except StorageError as error:
        return Damage(key, f"cannot be read ({error})")
