"""The filtered corpus of a labelled one: the rows that a rule keeps, and those that it drops.

Entry point: `filter_corpus`. Each file of a shard is built in memory, read back and created once. A
shard is done when its counts exist; the corpus is complete when the manifest exists.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from glob import escape
from itertools import chain
from pathlib import Path

import pyarrow as pa
from pydantic import computed_field

from pipeline.errors import FailedRowsError, Option, StorageError
from pipeline.filters.decisions import with_thresholds
from pipeline.filters.inputs import check_columns_of
from pipeline.filters.labelled import identity_of, labelled_shards
from pipeline.filters.layout import Layout, refuse_own_places, relative_paths
from pipeline.filters.policy import Judge, Policy, read_policy
from pipeline.filters.removal import removed_sql, stop_words
from pipeline.filters.shard import COUNTS, Counts, filter_shard, total
from pipeline.filters.snapshot_rule import SnapshotRule, failed_status
from pipeline.hashes import canonical_json, sha256_hex
from pipeline.ledger.rows import aligned_batches, asked_rows
from pipeline.ledger.snapshot_files import NamedShard
from pipeline.ledger.snapshots import Contents
from pipeline.options import FilterOptions, OnError
from pipeline.sources.shards import Shard
from pipeline.spec.schema import JobSpec
from pipeline.stores.local import LocalStore, drop_unfinished
from pipeline.stores.named_files import Target, open_target
from pipeline.stores.store import ATTEMPTS, Store, check_create_only, open_store

# Each thread holds a shard's texts and the file that is made of them.
SHARDS_AT_ONCE = 4
# Of what dropped a document, in the dropped files and the counts: 2 names each condition.
FORMAT = 2
CURRENT = "current.json"


@dataclass(frozen=True, slots=True)
class FilterResult:
    """What a filter wrote, and where."""

    kept_at: str
    kept_globs: tuple[str, ...]  # one for each format; a file is in one of them
    dropped_at: str
    dropped_glob: str
    current: str  # the file that always names the last filter of this folder
    manifest: str
    snapshot: int
    keep: str | None
    removes: str  # SQL that is true for exactly the dropped documents
    policy: str | None  # where the thresholds are; None of a rule without any
    on_error: OnError
    shards: int
    created: int  # objects; 0 if everything existed
    counts: Counts
    missing_rows: int  # rows of the input that the snapshot does not have
    missing_files: int
    new_files: int  # files that the input has now and the snapshot does not know
    limit: str | None = None  # the condition of the run that made the snapshot

    @computed_field
    @property
    def complete(self) -> bool:
        return not self.missing_rows and not self.missing_files


@dataclass(frozen=True, slots=True)
class _Filter:
    """One filter: a snapshot, a rule, and the stores that it writes to."""

    rule: SnapshotRule
    judge: Judge
    on_error: OnError
    layout: Layout
    kept: Store
    dropped: Store
    current: Target

    def keys(self, shard: NamedShard) -> tuple[str, str, str]:
        """The keys of a shard's objects, in the order in which they are created."""
        layout = self.layout
        return layout.dropped_key(shard), layout.kept_key(shard), layout.counts_key(shard)


def filter_corpus(spec: JobSpec, options: FilterOptions, *, cache_dir: Path) -> FilterResult:
    """Writes the filtered corpus of the spec's last snapshot; a second call writes nothing."""
    job = _prepare(spec, options)
    job.rule.warn_of_older_answers(cache_dir)
    contents, layout = job.rule.contents, job.layout
    folders = (job.kept, "kept"), (job.kept, "filters"), (job.dropped, "dropped")
    lists = (store.list(f"{folder}/{layout.id}/") for store, folder in folders)
    existing = frozenset(stored.key for stored in chain.from_iterable(lists))
    todo = [s for s in contents.shards if not existing.issuperset(job.keys(s))]
    created, new_files = 0, 0
    if todo or layout.manifest_key not in existing:
        check_create_only(job.kept, place=Option("to"))
        check_create_only(job.dropped, place=Option("to" if job.dropped is job.kept else "dropped"))
        shards, new_files = labelled_shards(spec, job.rule.store, contents, cache_dir)
        todo_shards = [shards[named.sid] for named in todo]
        inputs = job.rule.inputs
        check_columns_of(todo_shards, spec.input.storage_options, inputs, place="filter")
        if job.on_error == "fail":
            _refuse_failed(job)
        job = _with_thresholds(job, shards)
        created = _write(job, todo, shards, existing)
    manifest = json.loads(job.kept.read(layout.manifest_key))
    kept_at = f"{job.kept.url}/kept/{layout.id}"
    dropped_at = f"{job.dropped.url}/dropped/{layout.id}"
    result = FilterResult(
        kept_at=kept_at,
        kept_globs=tuple(f"{escape(kept_at)}/**/*{suffix}" for suffix in layout.kept_suffixes()),
        dropped_at=dropped_at,
        dropped_glob=f"{escape(dropped_at)}/**/*.parquet",
        current=job.current.url,
        manifest=f"{job.kept.url}/{layout.manifest_key}",
        snapshot=contents.number,
        keep=job.judge.policy.keep,
        removes=manifest["removes"],
        policy=f"{job.kept.url}/{layout.policy_key}" if job.judge.policy.clauses else None,
        on_error=job.on_error,
        shards=len(contents.shards),
        created=created,
        counts=COUNTS.validate_python(manifest["counts"]),
        missing_rows=contents.missing_rows,
        missing_files=contents.missing_files,
        new_files=new_files,
        limit=contents.limit,
    )
    _point_to(result, job)
    return result


def _prepare(spec: JobSpec, options: FilterOptions) -> _Filter:
    """The filter, after every check that needs no work."""
    to = options.folder()
    refuse_own_places(spec, to)
    refuse_own_places(spec, options.dropped or to, place="dropped")
    rule = SnapshotRule.of(spec)
    contents, policy = rule.contents, rule.policy
    on_error = options.on_error or rule.filter.on_error
    paths = {*contents.files["path"].unique().to_pylist()}
    layout = Layout(
        id=_filter_id(contents, policy, on_error),
        relative=relative_paths(spec.input.path, paths, spec.input.storage_options),
    )
    target = rule.filter.storage_options
    target_options = spec.storage_options if target is None else target
    kept = dropped = open_store(to, target_options, place=Option("to"))
    if options.dropped is not None:
        dropped = open_store(options.dropped, target_options, place=Option("dropped"))
    for store in (kept, dropped):
        if isinstance(store, LocalStore):
            drop_unfinished((store.root / ATTEMPTS).glob("create-*"))
    current = open_target(to, target_options).below(CURRENT)
    return _Filter(rule, rule.judge(policy), on_error, layout, kept, dropped, current)


def _filter_id(contents: Contents, policy: Policy, on_error: OnError) -> str:
    """Changes with each answer, input file and rule, and not with the number of the snapshot.

    The thresholds of a share follow from these.
    """
    content = {
        "format": FORMAT,
        "keep": policy.keep,
        "on_error": on_error,
        **identity_of(contents),
    }
    if policy.clauses:
        content["clauses"] = [
            {name: value for name, value in asdict(clause).items() if value != math.inf}
            for clause in policy.clauses
        ]
    return sha256_hex(canonical_json(content), 16)


def _refuse_failed(job: _Filter) -> None:
    """FailedRowsError if a document has no answer to a task that the rule reads."""
    columns = job.judge.columns
    names = ["status", *(task for task in job.rule.contents.tasks if task in columns)]
    schema = pa.schema([job.rule.answers_schema.field(name) for name in names])
    failed: Counter[str] = Counter()
    for batch in aligned_batches(job.rule.store, job.rule.contents, schema):
        failed.update(filter(None, failed_status(asked_rows(job.rule.contents, batch), columns)))
    if failed:
        raise FailedRowsError(stop_words(dict(failed.most_common()), job.rule.contents.rows))


def _with_thresholds(job: _Filter, shards: Mapping[str, Shard]) -> _Filter:
    """The filter with the thresholds of its shares: as written before, or computed now."""
    key = job.layout.policy_key
    if not job.rule.policy.clauses:
        return job
    if not any(stored.key == key for stored in job.kept.list(key)):
        policy = with_thresholds(job.rule, shards)
        job.kept.create(key, canonical_json(policy.to_json()) + b"\n")
    # — of two filters at once, the first to write
    policy = read_policy(job.kept.read(key), key)
    return replace(job, judge=job.rule.judge(policy))


def _write(
    job: _Filter, todo: Sequence[NamedShard], shards: Mapping[str, Shard], existing: frozenset[str]
) -> int:
    """Writes the missing objects and then the manifest; the number of created objects."""
    stores = job.dropped, job.kept, job.kept

    def write_one(named: NamedShard) -> int:
        *files, counts = filter_shard(job.rule, job.judge, job.on_error, named, shards[named.sid])
        data = *files, canonical_json(COUNTS.dump_python(counts))
        objects = zip(stores, job.keys(named), data, strict=True)
        missing = ((store, key, content) for store, key, content in objects if key not in existing)
        return sum(store.create(key, content) is not None for store, key, content in missing)

    with ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="filter") as pool:
        created = sum(pool.map(write_one, todo))
    return created + _publish(job)


def _publish(job: _Filter) -> int:
    """Writes the manifest; StorageError unless each document was kept or dropped exactly once."""
    contents, layout = job.rule.contents, job.layout
    shards = contents.shards
    parts = [COUNTS.validate_json(job.kept.read(layout.counts_key(shard))) for shard in shards]
    counts = total(parts)
    rows = counts.all.documents
    if contents.limit is None and rows != contents.rows:
        raise StorageError(
            f"{job.kept.url}/{layout.counts_folder}: counts {rows} documents, and the snapshot has "
            f"{contents.rows}; delete this folder and filter again"
        )
    files = [
        {
            "input": shard.path,
            "start_row": shard.start_row,
            "kept": layout.kept_key(shard),
            "kept_rows": part.all.kept.documents,
            "dropped": layout.dropped_key(shard),
            "dropped_rows": part.all.dropped.documents,
        }
        for shard, part in zip(shards, parts, strict=True)
    ]
    manifest = {
        "format": FORMAT,
        "id": layout.id,
        "spec": job.rule.spec.name,
        "output": job.rule.store.url,
        "snapshot": contents.number,
        "tasks": {name: task.fp for name, task in contents.tasks.items()},
        "keep": job.judge.policy.keep,
        "on_error": job.on_error,
        "removes": removed_sql(job.judge, job.on_error),
        "counts": COUNTS.dump_python(counts),
        "files": files,
    }
    return int(job.kept.create(layout.manifest_key, canonical_json(manifest)) is not None)


def _point_to(result: FilterResult, job: _Filter) -> None:
    """Writes `current.json`, last: the name that stays the same whatever the filter's id is."""
    content = {
        "format": FORMAT,
        "id": job.layout.id,
        "spec": job.rule.spec.name,
        "output": job.rule.store.url,
        "snapshot": result.snapshot,
        "keep": result.keep,
        "on_error": result.on_error,
        "complete": result.complete,
        "kept": {"folder": result.kept_at, "globs": list(result.kept_globs)},
        "dropped": {"folder": result.dropped_at, "globs": [result.dropped_glob]},
        "manifest": result.manifest,
        "policy": result.policy,
    }
    data = json.dumps(content, indent=2).encode() + b"\n"
    if not job.current.exists() or job.current.read() != data:
        with job.current.replaced() as file:
            file.write_bytes(data)
