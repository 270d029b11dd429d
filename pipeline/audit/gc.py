"""What an output holds that nothing needs any more, and its removal: the only verb that deletes.

Kept is what the last snapshots of each spec name, and what the next run of this spec would use, so
that an interrupted one loses nothing. Knows the keys of assay, and leaves every other alone. Knows
nothing of what the files hold or how findings are shown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import Problem, SpecError
from pipeline.ledger.contents import Contents, contents
from pipeline.ledger.keys import label_key, spec_key
from pipeline.ledger.snapshots import FOLDER as SNAPSHOTS
from pipeline.ledger.snapshots import snapshot_key
from pipeline.runtime.calibrations import versions_with_equal_raw_answers
from pipeline.runtime.job import jobs_for_each_dtype
from pipeline.sources.cuts import cut_before
from pipeline.sources.source import find_objects
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import ATTEMPTS, PROBE_KEY, Store, StoredObject, open_store

_TASK, _FP, _SID = r"(?P<task>[a-z][a-z0-9_]*)", r"(?P<fp>[0-9a-f]{16})", r"(?P<sid>[0-9a-f]{32})"
# In the order in which they are deleted: no reader finds a snapshot whose files are gone. What
# has another name was not written by assay, and stays.
LAYOUT = {
    SNAPSHOTS: re.compile(rf"{SNAPSHOTS}(?P<number>\d{{8,}})\.json"),
    "retries/": re.compile(rf"retries/{_TASK}/{_FP}/{_SID}/(?P<number>\d{{4,}})\.parquet"),
    "labels/": re.compile(rf"labels/{_TASK}/{_FP}/(?P<first>..)/(?=(?P=first)){_SID}\.parquet"),
    "documents/": re.compile(rf"documents/{_SID}\.parquet"),
    "specs/": re.compile(rf"specs/{_TASK}/{_FP}\.json"),
    ATTEMPTS: re.compile(rf"{ATTEMPTS}.+"),
}

Parts = Mapping[str, str]  # of a key, as the layout names them


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
        return {prefix: (count[prefix], size[prefix]) for prefix in LAYOUT}


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
    there = [found for prefix in LAYOUT for found in store.list(prefix)]
    cells = next_run(spec, store, cache_dir)
    kept = kept_snapshots(store, keep)
    named = frozenset(key for snapshot in kept for key in named_by(snapshot))
    removable = unneeded(there, Needed(named, cells))
    if delete:
        for prefix in LAYOUT:
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
    matches = (LAYOUT[SNAPSHOTS].fullmatch(found.key) for found in store.list(SNAPSHOTS))
    numbers = sorted((int(found["number"]) for found in matches if found), reverse=True)
    seen: Counter[str] = Counter()
    kept = []
    for number in numbers:
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
    for file in snapshot.files:
        yield file.key
        if file.task is not None:
            # — also behind a retry: without it the cell would count as missing, and be made anew
            yield label_key(file.task, snapshot.tasks[file.task].fp, file.sid)


def unneeded(there: Iterable[StoredObject], needed: Needed) -> Removable:
    """Those of the objects that are assay's and that nothing needs."""
    known, unknown = [], 0
    for found in there:
        match = LAYOUT[f"{found.key.partition('/')[0]}/"].fullmatch(found.key)
        unknown += match is None
        if match is not None:
            known.append((found, match.groupdict()))
    used = _used_cells(known, needed.cells)
    sids = needed.cells.sids.union(used.values())
    objects = tuple(f for f, parts in known if not _is_needed(f.key, parts, needed, used, sids))
    return Removable(objects, unknown)


def _is_needed(
    key: str, parts: Parts, needed: Needed, used: Mapping[str, str], sids: frozenset[str]
) -> bool:
    # — the probe is the same for all runs, and one that is asking it now must not miss it
    if key in needed.keys or key in used or key == PROBE_KEY:
        return True
    if key.startswith("documents/"):  # an earlier version's are of use beside its answers alone
        return parts["sid"] in sids
    if not key.startswith("specs/"):
        return False
    # — without its words, answers of another version would be found no more
    version = parts["task"], parts["fp"]
    return version in needed.cells.versions or version in needed.cells.others


def _used_cells(known: Iterable[tuple[StoredObject, Parts]], cells: Cells) -> dict[str, str]:
    """The shards of the label files and the latest retries that the next run would use, by key."""
    sids = cells.sids | cells.earlier
    in_reach = [(found.key, parts) for found, parts in known if parts.get("sid") in sids]
    own = {
        (parts["task"], parts["sid"])
        for key, parts in in_reach
        if key.startswith("labels/") and (parts["task"], parts["fp"]) in cells.versions
    }
    used: dict[str, str] = {}
    last: dict[str, tuple[int, str, str]] = {}  # by cell
    for key, parts in in_reach:
        version = parts.get("task", ""), parts.get("fp", "")
        has_own = (version[0], parts["sid"]) in own
        if version not in cells.versions and (version not in cells.others or has_own):
            continue
        if key.startswith("labels/"):
            used[key] = parts["sid"]
        else:
            cell = key.rpartition("/")[0]
            retry = int(parts["number"]), key, parts["sid"]
            last[cell] = max(last.get(cell, retry), retry)
    return used | {key: sid for _, key, sid in last.values()}
