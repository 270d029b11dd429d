"""Garbage collection: removes what no kept snapshot needs. Entry point: `collect_garbage`.

The only code that deletes results. One rule for all objects: those that the last snapshots of each
spec name are kept, and young ones of any spec, with everything that is needed to read them. So gc
needs neither the input nor the model, and several specs can share an output. Objects with keys that
assay does not write are left alone.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import inf

import pyarrow as pa

from pipeline.errors import option_error
from pipeline.ledger.attempts import GC, IN_USE, in_use
from pipeline.ledger.cells import stored_version
from pipeline.ledger.counts_log import log_again, logged_counts, of_objects
from pipeline.ledger.keys import (
    COUNTS,
    DOCUMENTS,
    LABELS,
    RETRIES,
    SNAPSHOTS,
    SPECS,
    Key,
    counts_key,
    documents_key,
    label_key,
    manifest_key,
    parse_key,
    snapshot_key,
    spec_key,
)
from pipeline.ledger.numbered import numbers_from_checkpoint
from pipeline.ledger.snapshots import headers, table_of
from pipeline.spec.fingerprint import Fingerprint
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import ATTEMPTS, PROBE_KEY, Store, StoredObject, open_store

# In this order, a reader never sees a snapshot whose files are already deleted. The log of cuts
# and the index of texts stay.
DELETION_ORDER = (SNAPSHOTS, RETRIES, LABELS, DOCUMENTS, COUNTS, SPECS, ATTEMPTS)
_DAY_S = 24 * 60 * 60.0

Version = tuple[str, str]  # task and fingerprint


@dataclass(frozen=True, slots=True)
class Removed:
    """The objects of a prefix that nothing needs."""

    objects: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GcResult:
    """What a garbage collection kept and removed."""

    output: str
    kept_snapshots: tuple[int, ...]
    deleted: bool  # False: a dry run
    young: int  # objects that are kept for their age alone
    unknown: int  # keys that assay does not write, inside its own folders
    prefixes: Mapping[str, Removed]  # counts only if an object is not needed
    keys: tuple[str, ...]  # that nothing needs, in the order of deletion


@dataclass(slots=True)
class _Snapshots:
    """The keys, versions and shards that the snapshots of an output name."""

    kept: list[int] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)  # named by kept snapshots, and their own
    versions: set[Version] = field(default_factory=set)  # of kept snapshots
    sids: set[str] = field(default_factory=set)  # of kept snapshots
    # For each version, when its last snapshot was published; kept or not.
    published_s: dict[Version, float] = field(default_factory=dict)


def collect_garbage(
    spec: JobSpec,
    *,
    keep: int | None,
    delete: bool,
    older_than_days: float,
    store: Store | None = None,
) -> GcResult:
    """The objects of the output that nothing needs; removed if `delete`. Without `keep`, all
    snapshots are kept, and nothing may be deleted.

    Objects younger than `older_than_days` are kept, by the store's clock if any are deleted.
    `store` is the spec's output, if it is open already. No model is read. RefusedError if objects
    would be deleted while a run is active.
    """
    if keep is None and delete:
        fix = "missing; write how many snapshots of each spec to keep, as in --keep 2"
        raise option_error("keep", fix)
    if keep is not None and keep < 1:
        fix = "at least one snapshot of each spec is kept; write 1 or more"
        raise option_error("keep", fix, keep)
    if not 0 <= older_than_days < inf:
        raise option_error("older_than_days", "write 0 or more days", older_than_days)
    output = store or open_store(spec.output, spec.storage_options)
    # — listed before the snapshots are read: what is written from now on is not in the list
    stored = {item.key: item for prefix in DELETION_ORDER for item in output.list(prefix)}
    with in_use(output, GC) if delete else nullcontext("") as own:
        # — the mark that was just made has the time of the store's clock; that of a killed process
        # may be later, if the clock was set back
        times = {mark.key: mark.modified_s for mark in output.list(IN_USE)}
        now_s = times.get(own, time.time())
        oldest_s = now_s - older_than_days * _DAY_S if older_than_days else inf
        result, counts = _unneeded(output, stored, inf if keep is None else keep, oldest_s)
        if delete and counts is not None:
            log_again(output, counts)
        for prefix in DELETION_ORDER if delete else ():
            output.delete([key for key in result.keys if key.startswith(prefix)])
    return replace(result, deleted=delete)


def _unneeded(
    output: Store, stored: Mapping[str, StoredObject], keep: float, oldest_s: float
) -> tuple[GcResult, pa.Table | None]:
    """The stored objects that nothing needs, before any is deleted.

    Also the counts with which their log begins again, if more than half of it is of files that go.
    """
    known = {name: key for name in stored if (key := parse_key(name)) is not None}
    snapshots = _read(output, keep, stored, oldest_s)
    named = _with_needed(snapshots.keys | _made_of(output, snapshots, known))
    kept = _with_needed(named | _young(stored, known, snapshots.published_s, oldest_s))
    logged = logged_counts(output)
    counts = of_objects(logged, [stored[name] for name in kept & stored.keys()])
    is_kept = logged.num_rows <= 2 * counts.num_rows
    if is_kept:  # — the last checkpoint has all counts before it
        log = {*map(counts_key, numbers_from_checkpoint(output, counts_key))}
        named, kept = named | log, kept | log
    # — all runs share the probe, and a run that starts now may be checking it
    objects = tuple(stored[name] for name in known if name not in kept and name != PROBE_KEY)
    result = GcResult(
        output=output.url,
        kept_snapshots=tuple(snapshots.kept),
        deleted=False,
        young=len(known.keys() & kept - named),
        unknown=len(stored) - len(known),
        prefixes={
            prefix: Removed(len(sizes), sum(sizes))
            for prefix in DELETION_ORDER
            if (sizes := [each.size_bytes for each in objects if each.key.startswith(prefix)])
            or prefix != COUNTS
        },
        keys=tuple(item.key for item in objects),
    )
    return result, None if is_kept else counts


def _read(
    store: Store, keep: float, stored: Mapping[str, StoredObject], oldest_s: float
) -> _Snapshots:
    """Of each spec, the last `keep` snapshots and the young ones are kept.

    StorageError if a snapshot is broken.
    """
    count: Counter[str] = Counter()
    read = _Snapshots()
    for snapshot in headers(store):
        number = snapshot["number"]
        header = stored.get(snapshot_key(number))
        made_s = header.modified_s if header else inf
        versions = {(name, str(task["fp"])) for name, task in snapshot["tasks"].items()}
        for version in versions:
            read.published_s[version] = max(made_s, read.published_s.get(version, -inf))
        count[snapshot["spec"]] += 1
        if count[snapshot["spec"]] > keep and made_s <= oldest_s:
            continue
        files = table_of(store, snapshot)
        read.kept.append(number)
        read.keys |= {snapshot_key(number), manifest_key(number), *files["key"].to_pylist()}
        read.versions |= versions
        read.sids |= {*files["sid"].unique().to_pylist()}
    return read


def _made_of(store: Store, read: _Snapshots, known: Mapping[str, Key]) -> set[str]:
    """The answers that the kept versions are made of, such as those of a cascade's stages.

    No snapshot names them, and other thresholds need them again. Those of shards that no kept
    snapshot has go, unless they are young.
    """
    tasks = {task for task, _ in read.versions}
    stored: dict[Version, Fingerprint] = {}
    for name, key in known.items():
        if name == spec_key(key.task, key.fp) and key.task in tasks:
            stored[key.task, key.fp] = stored_version(store, key.task, key.fp)
    kept = {(task, fp): stored[task, fp] for task, fp in read.versions if (task, fp) in stored}
    stages = {(task, stage) for (task, _), version in kept.items() for stage in version.stages}
    sources = {(task, fp) for (task, fp), own in stored.items() if (task, own.raw.id) in stages}
    sources |= {(task, own.raw.id) for (task, fp), own in kept.items() if fp != own.raw.id}
    # — an empty id is that of a file that belongs to no shard
    sids = read.sids | {""}
    versions = {name: (key.task, key.fp) for name, key in known.items() if key.sid in sids}
    return {name for name, version in versions.items() if version in sources}


def _young(
    stored: Mapping[str, StoredObject],
    known: Mapping[str, Key],
    published_s: Mapping[Version, float],
    oldest_s: float,
) -> set[str]:
    """The objects that are young, and unfinished work as a whole if some of it is young.

    The files of a version that are younger than its last snapshot are unfinished work: a corpus
    may take several weeks, in one run or in many.
    """
    young = {name for name in known if stored[name].modified_s > oldest_s}
    unfinished: defaultdict[Version, set[str]] = defaultdict(set)
    for name, key in known.items():
        version = key.task, key.fp
        if key.sid and key.task and stored[name].modified_s >= published_s.get(version, -inf):
            unfinished[version].add(name)
    return young.union(*(names for names in unfinished.values() if names & young))


def _with_needed(names: Collection[str]) -> set[str]:
    """These objects, and those without which the label files among them have no meaning."""
    keys = [key for key in map(parse_key, names) if key and key.folder in (LABELS, RETRIES)]
    sids = {key.sid for key in keys}
    versions = {(key.task, key.fp) for key in keys}
    return {
        *names,
        *(label_key(key.task, key.fp, key.sid) for key in keys),
        *map(documents_key, sids),
        *(spec_key(*version) for version in versions),
    }
