"""Garbage collection: removes what no snapshot and no next run of an output needs.

Entry point: `collect_garbage`, the only code that deletes results. It keeps what the last snapshots
of each spec name, what the next run of this spec would use, and everything that is young: it may be
the work of another spec, which no snapshot shows yet. So an interrupted run loses nothing. Objects
with keys that assay does not write are left alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from pipeline.errors import Problem, SpecError
from pipeline.ledger.cuts import cut_before
from pipeline.ledger.failed_rows import READ_THREADS
from pipeline.ledger.keys import (
    DOCUMENTS,
    INDEX,
    LABELS,
    RETRIES,
    SNAPSHOTS,
    SPECS,
    Key,
    calibration_key,
    documents_key,
    label_folders,
    label_key,
    manifest_key,
    parse_key,
    snapshot_key,
    spec_key,
)
from pipeline.ledger.label_files import read_file, shard_in
from pipeline.ledger.snapshots import Contents, contents, snapshot_numbers
from pipeline.ledger.text_index import shards_of_objects
from pipeline.runtime.calibration_files import versions_with_equal_raw_answers
from pipeline.runtime.job import Job, jobs_for_each_dtype, list_missing
from pipeline.sources.source import find_objects
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import ATTEMPTS, PROBE_KEY, Store, StoredObject, open_store

# In this order, a reader never sees a snapshot whose files are already deleted. Input logs stay.
_DAY_S = 24 * 60 * 60.0
DELETION_ORDER = (SNAPSHOTS, RETRIES, LABELS, DOCUMENTS, INDEX, SPECS, ATTEMPTS)


@dataclass(frozen=True, slots=True)
class Cells:
    """What the next run reads: current shards and their slices, and task versions."""

    sids: frozenset[str]
    versions: frozenset[tuple[str, str]]  # task and fingerprint
    # Versions with the same raw answers, used for shards without a label file of `versions`.
    others: frozenset[tuple[str, str]] = frozenset()
    # For a slice of a current shard, that shard: with its labels the slice's are not used.
    whole: Mapping[str, str] = field(default_factory=dict)
    # Whether answers are missing: the next run may take them over from any shard.
    incomplete: bool = False


@dataclass(frozen=True, slots=True)
class GcResult:
    """What a garbage collection kept and removed."""

    output: str
    snapshots: tuple[int, ...]  # kept
    objects: tuple[StoredObject, ...]  # that nothing needs, in the order of deletion
    young: int  # objects that are kept for their age alone
    unknown: int  # keys that assay does not write, inside its own folders
    deleted: bool  # False: a dry run

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(stored.key for stored in self.objects)

    @property
    def per_prefix(self) -> dict[str, tuple[int, int]]:
        """Count and bytes, by prefix; of the index only if an object of it is not needed."""
        amounts = {prefix: (0, 0) for prefix in DELETION_ORDER if prefix != INDEX}
        for stored in self.objects:
            prefix = f"{stored.key.partition('/')[0]}/"
            count, size_bytes = amounts.get(prefix, (0, 0))
            amounts[prefix] = count + 1, size_bytes + stored.size_bytes
        return amounts


def collect_garbage(
    spec: JobSpec,
    *,
    cache_dir: Path,
    keep: int,
    delete: bool,
    older_than_days: float,
    store: Store | None = None,
) -> GcResult:
    """What the output holds and nothing needs; removed if `delete`. No run may be active.

    Objects younger than `older_than_days`, by the store's clock, are kept. `store` is the spec's
    output, if it is open already.
    """
    if keep < 1:
        fix = "at least one snapshot of each spec is kept; write 1 or more"
        raise SpecError([Problem("--keep", fix, keep)])
    if not older_than_days >= 0:
        raise SpecError([Problem("--older-than", "write 0 or more days", older_than_days)])
    output = store or open_store(spec.output, spec.storage_options)
    # — listed before the snapshots are read: what is written from now on is not in the list
    stored = [each for prefix in DELETION_ORDER for each in output.list(prefix)]
    cells = _cells_of_next_run(spec, output, cache_dir)
    oldest_s = time.time() - older_than_days * _DAY_S if older_than_days else inf
    young = frozenset(each.key for each in stored if each.modified_s > oldest_s)
    kept = _kept_snapshots(output, keep, young)
    named = frozenset(key for snapshot in kept for key in _named_keys(snapshot))
    index = shards_of_objects(output)
    unneeded, unknown = _unneeded(stored, named, cells, index)
    needed_by_young = _needed_by(young, index)
    objects = tuple(each for each in unneeded if each.key not in needed_by_young)
    if delete:
        for prefix in DELETION_ORDER:
            output.delete([each.key for each in objects if each.key.startswith(prefix)])
    numbers = tuple(snapshot.number for snapshot in kept)
    return GcResult(output.url, numbers, objects, len(unneeded) - len(objects), unknown, delete)


def _cells_of_next_run(spec: JobSpec, store: Store, cache_dir: Path) -> Cells:
    source = spec.input
    objects = find_objects(source.path, cache_dir, source.storage_options)
    cuts = cut_before(store, objects, source.columns)
    # — the next run may be on another machine, with another dtype
    jobs = jobs_for_each_dtype(spec, cache_dir)
    # — raw answers too: the next calibration is computed from them and applied to them
    versions = frozenset(
        (task, version.id)
        for job in jobs
        for each in job.with_stages
        for task, own in each.fingerprints.items()
        for version in (own, own.raw)
    )
    others = frozenset(
        (task, fp)
        for job in jobs
        for task, fps in versions_with_equal_raw_answers(store, job.fingerprints).items()
        for fp in fps
    )
    sids = frozenset(shard.id for shard in cuts.shards)
    slices = cuts.other_slices
    whole = {sid: shard for shard, of_shard in slices.items() for sid in of_shard}
    for own in (stage for job in jobs for stage in job.with_stages if stage.stage):
        whole |= _slices_of_texts(store, own, sids, whole)
    incomplete = bool(cuts.uncut) or all(list_missing(j, store, cuts).work_items for j in jobs)
    return Cells(sids, versions, others - versions, whole, incomplete)


def _slices_of_texts(
    store: Store, stage: Job, sids: Collection[str], known: Collection[str]
) -> dict[str, str]:
    """The slices of these shards that a stage of a cascade labelled, with their shards.

    They are in no log: their labels are kept because other thresholds may need them.
    """
    folders = (label_folders(task, stage.fp[task])[0] for task in stage.stage_tasks)
    keys = (parse_key(stored.key) for folder in folders for stored in store.list(folder))
    unknown = {key.sid for key in keys if key and key.sid not in sids and key.sid not in known}

    def shard_of(sid: str) -> tuple[str, str]:
        return sid, shard_in(read_file(store, documents_key(sid), ["doc_id"])).whole.id

    with ThreadPoolExecutor(READ_THREADS) as pool:
        return {sid: shard for sid, shard in pool.map(shard_of, unknown) if shard in sids}


def _kept_snapshots(store: Store, keep: int, young: Collection[str]) -> list[Contents]:
    """The last `keep` snapshots of each spec and the young ones, newest first.

    StorageError if a snapshot is broken.
    """
    count: Counter[str] = Counter()
    kept = []
    for number in snapshot_numbers(store):
        snapshot = contents(store, number)
        count[snapshot.spec] += 1
        if count[snapshot.spec] <= keep or snapshot_key(number) in young:
            kept.append(snapshot)
    return kept


def _named_keys(snapshot: Contents) -> Iterator[str]:
    """The keys that a snapshot needs, including its own."""
    yield snapshot_key(snapshot.number)
    yield manifest_key(snapshot.number)
    for name, task in snapshot.tasks.items():
        yield spec_key(name, task.fp)
        yield calibration_key(name, task.fp)
    for file in snapshot.files:
        yield file.key
        if file.task is not None:
            # — also below a retry: without this file the cell counts as missing and is labelled
            yield label_key(file.task, snapshot.tasks[file.task].fp, file.sid)


def _needed_by(young: frozenset[str], index: Mapping[str, Collection[str]]) -> frozenset[str]:
    """The young objects, and the older ones without which a young label file has no meaning."""
    keys = [key for key in map(parse_key, young) if key and key.folder in (LABELS, RETRIES)]
    sids = {key.sid for key in keys}
    versions = {(key.task, key.fp) for key in keys}
    return young.union(
        (label_key(key.task, key.fp, key.sid) for key in keys),
        map(documents_key, sids),
        (name_of(*version) for version in versions for name_of in (spec_key, calibration_key)),
        (name for name, indexed in index.items() if not sids.isdisjoint(indexed)),
    )


def _unneeded(
    stored: Iterable[StoredObject],
    named: frozenset[str],
    cells: Cells,
    index: Mapping[str, Collection[str]],
) -> tuple[tuple[StoredObject, ...], int]:
    """The objects that are neither named nor used by the next run, and the unknown keys' number.

    `index` has the shards of each object of the index of texts, by key.
    """
    parsed = [(each, parse_key(each.key)) for each in stored]
    known = [(each, key) for each, key in parsed if key is not None]
    used = _used_cells(known, cells)
    sids = cells.sids.union(used.values())
    versions = cells.versions | cells.others

    def is_needed(name: str, key: Key) -> bool:
        # — all runs share the probe, and a run that starts now may be checking it
        if name in named or name in used or name == PROBE_KEY:
            return True
        # — documents of other shards are used only together with their answers
        if key.folder == DOCUMENTS:
            return key.sid in sids
        if key.folder == INDEX:
            return any(sid in sids or documents_key(sid) in named for sid in index.get(name, ()))
        # — without its spec, the answers of a version cannot be matched any more
        return key.folder == SPECS and (key.task, key.fp) in versions

    unneeded = tuple(each for each, key in known if not is_needed(each.key, key))
    return unneeded, len(parsed) - len(known)


def _used_cells(known: Iterable[tuple[StoredObject, Key]], cells: Cells) -> dict[str, str]:
    """The label files and latest retries that the next run would use: key -> shard id."""
    sids = cells.sids.union(cells.whole)
    in_reach = [(stored.key, key) for stored, key in known if cells.incomplete or key.sid in sids]
    own = {
        (key.task, key.sid)
        for _, key in in_reach
        if key.folder == LABELS and (key.task, key.fp) in cells.versions
    }
    labelled = {(key.task, key.fp, key.sid) for _, key in in_reach if key.folder == LABELS}
    used: dict[str, str] = {}
    last: dict[tuple[str, str, str], tuple[int, str]] = {}  # by cell
    for name, key in in_reach:
        version = key.task, key.fp
        has_own = (key.task, key.sid) in own
        if version not in cells.versions and (version not in cells.others or has_own):
            continue
        if (*version, cells.whole.get(key.sid)) in labelled:
            continue
        if key.folder == LABELS:
            used[name] = key.sid
        else:
            cell, retry = (*version, key.sid), (key.number, name)
            last[cell] = max(last.get(cell, retry), retry)
    return used | {name: sid for (_, _, sid), (_, name) in last.items()}
