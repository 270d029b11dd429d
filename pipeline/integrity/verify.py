"""Whether an output is intact: everything that its current snapshot names, read again.

Entry point: `verify_output`. Certificates are computed again from the answers that the output has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import computed_field

from pipeline.errors import SpecError, StorageError, UnavailableError
from pipeline.evaluation.promises import Judged, Proof
from pipeline.fitted.certificate import Certificate, hash_of
from pipeline.hashes import canonical_json, parse_json, sha256_hex
from pipeline.ledger.cells import committed, stored_fps, stored_version
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS, probabilities, structs
from pipeline.ledger.keys import CASCADES, parse_key, spec_key
from pipeline.ledger.label_files import metadata_of, read_file, remedy
from pipeline.ledger.snapshot_files import NamedFile, NamedShard
from pipeline.ledger.snapshots import Contents, SnapshotTask, contents, last_snapshot
from pipeline.runtime.conditions import drawn_below, drawn_rows
from pipeline.sources.shards import Shard
from pipeline.sources.source import InputObject, find_objects, read_documents
from pipeline.sources.streams import Options
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.schema import Columns, JobSpec
from pipeline.stores.store import Store, open_store

logger = logging.getLogger(__name__)

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
        check = partial(_check_shard, store, snapshot.tasks, inputs, options)
        shards, checked = iter(snapshot.shards), list[_CheckedShard]()
        while window := list(islice(shards, WINDOW_SHARDS)):
            checked += pool.map(check, window)
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
                wrong_certificates(store, snapshot),
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


def wrong_certificates(store: Store, snapshot: Contents) -> Iterator[Damage]:
    """A damage for each certificate of the snapshot that the stored answers do not confirm.

    A certificate is not computed again if the snapshot has other shards than it is about.
    """
    shards = hash_of(shard.sid for shard in snapshot.shards)
    for task, certificate in snapshot.certificates.items():
        if certificate.thresholds is None or not certificate.shares:
            continue
        if certificate.shards != shards:
            logger.info("%s: the certificate is of other shards: not computed again", task)
            continue
        damage = partial(
            Damage,
            f"the certificate of {task}",
            fix=f"delete {CASCADES}{task}/, then `assay run` proves the promise again",
        )
        try:
            computed = _computed(store, snapshot, certificate)
            answered = stored_version(store, task, snapshot.tasks[task].fp).content["cascade"]
        except UnavailableError:
            raise
        except (StorageError, ValueError, LookupError) as error:
            yield damage(f"cannot be computed again: {error}")
            continue
        stated = {name: (own.trials, own.errors) for name, own in certificate.shares.items()}
        trials = {name: (own.trials, own.errors) for name, own in computed.shares.items()}
        if computed.rule != certificate.rule:
            yield damage("has a rule that the stored answers do not prove")
        elif trials != stated:
            yield damage(f"says (trials, errors) {stated}, and the stored answers say {trials}")
        elif canonical_json(answered) != canonical_json(certificate.content):
            yield damage("has other stages or thresholds than the answers")


def _computed(store: Store, snapshot: Contents, certificate: Certificate) -> Proof:
    """The proof of the certificate's rule and of more careful ones, from the stored answers."""
    of_task, kind = snapshot.tasks[certificate.task], _kind(snapshot, certificate.task)
    judged = Judged.of(of_task.labels, kind, certificate.promise)
    # The rows of the second half, of each shard that has documents of the sample.
    second = {
        shard.sid: drawn[~is_first]
        for shard in snapshot.shards
        for drawn, is_first in [drawn_rows(shard.sid, shard.rows, certificate.draw)]
        if len(drawn)
    }
    p = np.stack(
        [_answers(store, snapshot, certificate, raw, second) for raw in certificate.stages]
    )
    p = p[:, ~np.isnan(p[-1]).any(axis=1)]
    cheap, whole = p[:-1], p[-1]
    assert certificate.thresholds is not None, certificate.task
    rules = [
        *judged.rules(np.array(certificate.curves))[: certificate.rule],
        certificate.thresholds,
    ]
    groups = np.array(certificate.groups) if certificate.groups else None
    return judged.proof(rules, cheap, whole, groups)


def _kind(snapshot: Contents, task: str) -> str:
    columns = snapshot.tasks[task].columns
    return next(
        (kind for kind, name in (("multi", "labels"), ("score", "score")) if name in columns),
        "choice",
    )


def _answers(
    store: Store,
    snapshot: Contents,
    certificate: Certificate,
    raw: str,
    rows_of: Mapping[str, NDArray[np.int64]],  # by shard
) -> NDArray[np.float64]:  # [docs, labels]
    """What a stage answered about these rows."""
    task = certificate.task
    when, *_ = _conditions(stored_version(store, task, snapshot.tasks[task].fp))
    asked = when, None, drawn_below(certificate.draw)
    labels, missing = list(snapshot.tasks[task].labels), dict(rows_of)
    parts = dict[str, NDArray[np.float64]]()
    for fp in stored_fps(store, task):
        version = stored_version(store, task, fp)
        if version.raw.id != raw or _conditions(version) != asked:
            continue
        done = committed(store, {task: fp}, missing, documents={})
        for sid in done.labels[task]:
            rows = structs(read_file(store, done.label_key(task, sid), ["p"]))
            parts[sid] = probabilities(rows.take(pa.array(missing.pop(sid))), labels)
    if missing:
        raise StorageError(
            f"{store.url}: has no answers of a stage about shard {next(iter(missing))}"
        )
    return np.concatenate([parts[sid] for sid in rows_of])


def _conditions(version: Fingerprint) -> tuple[Any, Any, Any]:
    """The condition of the task, what a stage comes after, and the condition of the run."""
    when, after, limit = map(version.content.get, ("when", "after", "limit"))
    return when, after, limit


def _check_shard(
    store: Store,
    tasks: Mapping[str, SnapshotTask],
    inputs: Mapping[str, list[InputObject]],  # the objects that are there now, by path
    options: Options,  # of the input
    shard: NamedShard,
) -> _CheckedShard:
    """The files of one shard, compared with each other and with the input."""
    damages: list[Damage] = []
    documents = _checked(store, shard, None, None, damages)
    for task in shard.labels:
        answers = _checked(store, shard, task, tasks[task], damages)
        if answers is None or documents is None:
            continue
        if where := _differing(answers.column("doc_id"), documents.column("doc_id")):
            reason = f"doc_id is not in the order of {shard.documents.key}: {where}"
            damages.append(_damage(shard.labels[task], reason))
    origin = None if documents is None else _shard_in(documents)
    if documents is None or origin is None or shard.sid != origin.id:
        return _CheckedShard(tuple(damages))
    version = origin.version
    columns = Columns(version.text_column, version.id_column, version.image_column, version.quoted)
    # — without the view: a data file of a table is found by its path alone
    own = replace(version, view=None)
    if all(replace(item.version(columns), view=None) != own for item in inputs[shard.path]):
        return _CheckedShard(tuple(damages), changed=shard.path)
    compared = ["doc_id", "content_hash"]
    read = read_documents(origin, options)
    read_again = pa.concat_tables(part.select(compared) for part in read)
    for column in compared:
        if where := _differing(documents.column(column), read_again.column(column)):
            reason = f"{column} differs from {shard.path}, from row {shard.start_row}: {where}"
            damages.append(_damage(shard.documents, reason))
    return _CheckedShard(tuple(damages), read_again=shard.rows)


def _damage(file: NamedFile, reason: str) -> Damage:
    return Damage(file.key, reason, remedy(file.key))


def _checked(
    store: Store,
    shard: NamedShard,
    task: str | None,
    version: SnapshotTask | None,
    damages: list[Damage],
) -> pa.Table | None:
    """The rows of the shard's documents file, or of the task's label file; None if it is damaged.

    Its damages are appended to `damages`.
    """
    file = shard.documents if task is None else shard.labels[task]
    columns = DOCUMENTS_FILE_COLUMNS if version is None else ("doc_id", *version.columns)
    fp = None if version is None else version.fp
    try:
        table = read_file(store, file.key, None, published=file.hash).select(columns)
    except UnavailableError:
        raise
    except (StorageError, KeyError) as error:
        reason = str(error).removeprefix(f"{store.url}/{file.key}: ")
        damages.append(_damage(file, reason.removesuffix(f"; {remedy(file.key)}")))
        return None
    if table.num_rows != shard.rows:
        reason = f"has {table.num_rows} rows; {shard.rows} were published"
        damages.append(_damage(file, reason))
    key, metadata, origin = parse_key(file.key), metadata_of(table), _shard_in(table)
    if key is None or (key.task, key.fp, key.sid) != (task or "", fp or "", shard.sid):
        damages.append(_damage(file, f"is not a key of shard {shard.sid}"))
    for name, actual, expected in (
        ("task", metadata.get("task"), task),
        ("fp", metadata.get("fp"), fp),
        ("shard", origin and origin.id, shard.sid),
    ):
        if actual != expected:
            reason = f"its metadata has {name} {actual!r}, and its key has {expected!r}"
            damages.append(_damage(file, reason))
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
