"""What an output holds that nothing needs any more, and its removal: the only verb that deletes.

Kept is what the last snapshots of each spec name, and what the next run of this spec would use, so
that an interrupted one loses nothing. Knows the keys of assay, and leaves every other alone. Knows
nothing of what the files hold or how findings are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import Problem, SpecError
from pipeline.ledger.contents import Contents, contents
from pipeline.ledger.cuts import cut_before
from pipeline.ledger.keys import (
    DOCUMENTS,
    LABELS,
    RETRIES,
    SNAPSHOTS,
    SPECS,
    Key,
    calibration_key,
    label_key,
    parse_key,
    snapshot_key,
    spec_key,
)
from pipeline.ledger.snapshots import snapshot_numbers
from pipeline.runtime.calibrations import versions_with_equal_raw_answers
from pipeline.runtime.job import jobs_for_each_dtype
from pipeline.sources.source import find_objects
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import ATTEMPTS, PROBE_KEY, Store, StoredObject, open_store

# In this order, a reader never sees a snapshot whose files are already deleted. Input logs stay.
DELETION_ORDER = (SNAPSHOTS, RETRIES, LABELS, DOCUMENTS, SPECS, ATTEMPTS)


@dataclass(frozen=True, slots=True)
class Cells:
    """What a run looks at: shards, those of earlier versions of the same files, and tasks."""

    sids: frozenset[str]
    earlier: frozenset[str]
    versions: frozenset[tuple[str, str]]  # task and fingerprint
    # What has the raw answers of those too, and is used where a shard has none of its own.
    others: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Needed:
    """What stays: keys by name, and the cells of the next run."""

    keys: frozenset[str]
    cells: Cells


@dataclass(frozen=True, slots=True)
class Removable:
    """What nothing needs, in the order in which it is deleted."""

    objects: tuple[StoredObject, ...]
    unknown: int  # keys that are not assay's, though they lie where assay's do

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(found.key for found in self.objects)

    @property
    def per_prefix(self) -> dict[str, tuple[int, int]]:
        """Count and bytes, by prefix."""
        count: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for found in self.objects:
            prefix = f"{found.key.partition('/')[0]}/"
            count[prefix] += 1
            size[prefix] += found.size_bytes
        return {prefix: (count[prefix], size[prefix]) for prefix in DELETION_ORDER}


@dataclass(frozen=True, slots=True)
class GcResult:
    """How tidying up ended."""

    output: str
    snapshots: tuple[int, ...]  # those that are kept
    removable: Removable
    deleted: bool  # False: a dry run


def collect_garbage(spec: JobSpec, *, cache_dir: Path, keep: int, delete: bool) -> GcResult:
    """What the output holds in vain; with `delete`, that is gone. Not while a run is under way."""
    if keep < 1:
        fix = "at least one snapshot of each spec is kept; write 1 or more"
        raise SpecError([Problem("--keep", fix, keep)])
    return collect_garbage_in(
        spec, open_store(spec.output, spec.storage_options), cache_dir, keep, delete
    )


def collect_garbage_in(
    spec: JobSpec, store: Store, cache_dir: Path, keep: int, delete: bool
) -> GcResult:
    """The same for a store that is open."""
    # — listed before anything that names them is read: what is written meanwhile is not in it
    there = [found for prefix in DELETION_ORDER for found in store.list(prefix)]
    cells = next_run(spec, store, cache_dir)
    kept = kept_snapshots(store, keep)
    named = frozenset(key for snapshot in kept for key in named_by(snapshot))
    removable = unneeded(there, Needed(named, cells))
    if delete:
        for prefix in DELETION_ORDER:
            store.delete([key for key in removable.keys if key.startswith(prefix)])
    return GcResult(store.url, tuple(s.number for s in kept), removable, delete)


def next_run(spec: JobSpec, store: Store, cache_dir: Path) -> Cells:
    """The cells that the spec's next run would not make again."""
    wanted = spec.input
    objects = find_objects(wanted.path, cache_dir, wanted.storage_options)
    cuts = cut_before(store, objects, wanted.text, wanted.id)
    # — the run may be on another machine than this one, and compute in other numbers there
    jobs = jobs_for_each_dtype(spec, cache_dir)
    # — raw answers, too: the next calibration is made of them, and used on them
    versions = frozenset(
        (task, version.id)
        for job in jobs
        for task, own in job.fingerprints.items()
        for version in (own, own.raw)
    )
    others = frozenset(
        (task, fp)
        for job in jobs
        for task, fps in versions_with_equal_raw_answers(store, job.fingerprints).items()
        for fp in fps
    )
    return Cells(
        sids=frozenset(shard.id for shard in cuts.shards),
        earlier=cuts.earlier_sids,
        versions=versions,
        others=others - versions,
    )


def kept_snapshots(store: Store, keep: int) -> list[Contents]:
    """The last `keep` snapshots of each spec, the newest first; StorageError if one is broken."""
    seen: Counter[str] = Counter()
    kept = []
    for number in snapshot_numbers(store):
        snapshot = contents(store, number)
        seen[snapshot.spec] += 1
        if seen[snapshot.spec] <= keep:
            kept.append(snapshot)
    return kept


def named_by(snapshot: Contents) -> Iterator[str]:
    """The keys that a snapshot needs, its own too."""
    yield snapshot_key(snapshot.number)
    for name, task in snapshot.tasks.items():
        yield spec_key(name, task.fp)
        yield calibration_key(name, task.fp)
    for file in snapshot.files:
        yield file.key
        if file.task is not None:
            # — also behind a retry: without it the cell would count as missing, and be made anew
            yield label_key(file.task, snapshot.tasks[file.task].fp, file.sid)


def unneeded(there: Iterable[StoredObject], needed: Needed) -> Removable:
    """Those of the objects that are assay's and that nothing needs."""
    known, unknown = [], 0
    for found in there:
        key = parse_key(found.key)
        if key is None:
            unknown += 1
        else:
            known.append((found, key))
    used = _used_cells(known, needed.cells)
    sids = needed.cells.sids.union(used.values())
    objects = tuple(f for f, key in known if not _is_needed(f.key, key, needed, used, sids))
    return Removable(objects, unknown)


def _is_needed(
    name: str, key: Key, needed: Needed, used: Mapping[str, str], sids: frozenset[str]
) -> bool:
    # — the probe is the same for all runs, and one that is asking it now must not miss it
    if name in needed.keys or name in used or name == PROBE_KEY:
        return True
    if key.folder == DOCUMENTS:  # an earlier version's are of use beside its answers alone
        return key.sid in sids
    if key.folder != SPECS:
        return False
    # — without its words, answers of another version would be found no more
    version = key.task, key.fp
    return version in needed.cells.versions or version in needed.cells.others


def _used_cells(known: Iterable[tuple[StoredObject, Key]], cells: Cells) -> dict[str, str]:
    """The shards of the label files and the latest retries that the next run would use, by key."""
    sids = cells.sids | cells.earlier
    in_reach = [(found.key, key) for found, key in known if key.sid in sids]
    own = {
        (key.task, key.sid)
        for _, key in in_reach
        if key.folder == LABELS and (key.task, key.fp) in cells.versions
    }
    used: dict[str, str] = {}
    last: dict[tuple[str, str, str], tuple[int, str]] = {}  # by cell
    for name, key in in_reach:
        version = key.task, key.fp
        has_own = (key.task, key.sid) in own
        if version not in cells.versions and (version not in cells.others or has_own):
            continue
        if key.folder == LABELS:
            used[name] = key.sid
        else:
            cell, retry = (*version, key.sid), (key.number, name)
            last[cell] = max(last.get(cell, retry), retry)
    return used | {name: sid for (_, _, sid), (_, name) in last.items()}
