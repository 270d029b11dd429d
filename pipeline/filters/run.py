"""From a labelled corpus to a filtered one: the rows that a rule keeps, and those that it drops.

Shard by shard, each file built in memory, read back and created once; a shard is done when its
counts are there, and the corpus when the manifest is. Knows the order of the work. Knows nothing of
formats (`kept_rows`), of SQL (`rule`) or of how results are shown.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.errors import FailedRowsError, Problem, SpecError, StorageError
from pipeline.filters.facts import check_columns_of
from pipeline.filters.layout import Layout, refuse_own_input, relative_paths
from pipeline.filters.rule import Rule
from pipeline.filters.shard import (
    Counts,
    FilteredShard,
    FilterSplit,
    counts_from_json,
    failed_status,
    filter_shard,
    total,
)
from pipeline.filters.writers import CONVERTED
from pipeline.hashes import canonical_json, sha256_hex
from pipeline.ledger.contents import Contents, NamedShard, last_contents
from pipeline.ledger.cuts import cut_before
from pipeline.ledger.rows import aligned_batches, refuse_changed, wide_schema
from pipeline.options import FilterOptions, OnError
from pipeline.sources.shards import Shard
from pipeline.sources.source import find_objects, format_of
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, check_create_only, open_store

# Each holds a shard's texts and the file that is made of them.
SHARDS_AT_ONCE = 4
FORMAT = 1


@dataclass(frozen=True, slots=True)
class FilterResult:
    """How a filter ended."""

    kept_at: str
    dropped_at: str
    manifest: str
    snapshot: int
    keep: str
    on_error: OnError
    shards: int
    created: int  # objects; 0: all was there
    counts: Counts
    missing_rows: int  # of the input, which the snapshot leaves out
    missing_files: int
    new_files: int  # of the input as it is now, which the snapshot does not know

    @property
    def complete(self) -> bool:
        return not self.missing_rows and not self.missing_files


@dataclass(frozen=True, slots=True)
class _Filter:
    """One filter: of which snapshot, by which rule, into which stores."""

    spec: JobSpec
    store: Store
    found: Contents
    split: FilterSplit
    layout: Layout
    kept: Store
    dropped: Store

    def there(self) -> frozenset[str]:
        """The keys of this filter that exist: one LIST for each kind."""
        of_id = f"/{self.layout.id}/"
        kept = {stored.key for stored in self.kept.list(f"kept{of_id}")}
        counts = {stored.key for stored in self.kept.list(f"filters{of_id}")}
        return frozenset(kept | counts | {s.key for s in self.dropped.list(f"dropped{of_id}")})

    def keys(self, shard: NamedShard) -> tuple[str, str, str]:
        """Of a shard, in the order in which they are created."""
        layout = self.layout
        return layout.dropped_key(shard), layout.kept_key(shard), layout.counts_key(shard)


def filter_corpus(spec: JobSpec, filter_options: FilterOptions, *, cache_dir: Path) -> FilterResult:
    """Writes the filtered corpus of the spec's last snapshot; doing it again writes nothing."""
    asked = _asked(spec, filter_options)
    there = asked.there()
    left = [s for s in asked.found.shards if not there.issuperset(asked.keys(s))]
    created, new_files = 0, 0
    if left or asked.layout.manifest_key not in there:
        check_create_only(asked.kept)
        check_create_only(asked.dropped)
        refuse_changed(asked.store, asked.found, list(asked.found.tasks))
        shards, new_files = _input_now(asked, cache_dir)
        options = spec.input.storage_options
        check_columns_of([shards[named.sid] for named in left], options, filter_options.by)
        if asked.split.on_error == "fail":
            _refuse_failed(asked)
        created = _write(asked, left, shards, there)
    manifest = json.loads(asked.kept.read(asked.layout.manifest_key))
    return FilterResult(
        kept_at=f"{asked.kept.url}/kept/{asked.layout.id}",
        dropped_at=f"{asked.dropped.url}/dropped/{asked.layout.id}",
        manifest=f"{asked.kept.url}/{asked.layout.manifest_key}",
        snapshot=asked.found.number,
        keep=asked.split.rule.keep,
        on_error=asked.split.on_error,
        shards=len(asked.found.shards),
        created=created,
        counts=counts_from_json(manifest["counts"]),
        missing_rows=asked.found.missing_rows,
        missing_files=asked.found.missing_files,
        new_files=new_files,
    )


def _asked(spec: JobSpec, filter_options: FilterOptions) -> _Filter:
    """The filter, with everything refused that can be before any work."""
    if spec.filter is None:
        fix = "missing; write keep: and a condition, such as toxic.p.toxic < 0.5"
        raise SpecError([Problem("filter", fix)])
    options = spec.input.storage_options
    for place in (filter_options.to, filter_options.dropped or filter_options.to):
        refuse_own_input(spec.input.path, place, options)
    store = open_store(spec.output, spec.storage_options)
    found = last_contents(store, spec.name)
    _refuse_other_tasks(spec, store, found)
    schema = wide_schema(found, list(found.tasks))
    on_error = filter_options.on_error or spec.filter.on_error
    split = FilterSplit(Rule(spec.filter.keep, schema), on_error, filter_options.by, schema)
    relative = relative_paths(spec.input.path, {s.path for s in found.shards}, options)
    groups_id = (
        sha256_hex(canonical_json(list(filter_options.by)), 8) if filter_options.by else "all"
    )
    layout = Layout(_id(found, spec.filter.keep, on_error), groups_id, relative)
    target = spec.filter.storage_options
    target = spec.storage_options if target is None else target
    kept = open_store(filter_options.to, target)
    dropped = kept if filter_options.dropped is None else open_store(filter_options.dropped, target)
    return _Filter(spec, store, found, split, layout, kept, dropped)


def _refuse_other_tasks(spec: JobSpec, store: Store, found: Contents) -> None:
    wanted = {task.name: tuple(task.labels) for task in spec.tasks}
    if wanted != {name: task.labels for name, task in found.tasks.items()}:
        raise StorageError(
            f"{store.url}: snapshot {found.number} of {spec.name} has other tasks or labels than "
            f"the spec has now; `assay run` first"
        )


def _id(found: Contents, keep: str, on_error: OnError) -> str:
    """Changes with every answer, every input file and the rule; not with the snapshot's number."""
    content = {
        "format": FORMAT,
        "keep": keep,
        "on_error": on_error,
        "tasks": {name: task.fp for name, task in found.tasks.items()},
        "shards": [[s.path, s.start_row, s.rows, *(f.key for f in s.files)] for s in found.shards],
    }
    if any(format_of(shard.path) in CONVERTED for shard in found.shards):
        content["converted"] = CONVERTED  # earlier versions kept these in their own format
    return sha256_hex(canonical_json(content), 16)


def _input_now(asked: _Filter, cache_dir: Path) -> tuple[dict[str, Shard], int]:
    """By id, the snapshot's shards; StorageError where the input has another version by now."""
    wanted = asked.spec.input
    objects = find_objects(wanted.path, cache_dir, wanted.storage_options)
    shards = cut_before(asked.store, objects, wanted.text, wanted.id).shards
    by_sid = {shard.id: shard for shard in shards}
    for shard in asked.found.shards:
        if shard.sid not in by_sid:
            raise StorageError(
                f"{shard.path}: is gone, or another than snapshot {asked.found.number} labelled; "
                f"`assay run` labels the input as it is now"
            )
    known = {shard.path for shard in asked.found.shards}
    empty = {found.path for found in objects} - {shard.path for shard in shards}
    return by_sid, len({found.path for found in objects} - known - empty)


def _refuse_failed(asked: _Filter) -> None:
    """FailedRowsError if a document that the rule asks about has no answer."""
    names = ["status", *(t for t in asked.found.tasks if t in asked.split.rule.columns)]
    schema = pa.schema([asked.split.schema.field(name) for name in names])
    failed: Counter[str] = Counter()
    for batch in aligned_batches(asked.store, asked.found, schema):
        failed.update(filter(None, failed_status(batch, asked.split.rule.columns)))
    if failed:
        told = ", ".join(f"{status} {count:,}" for status, count in failed.most_common())
        raise FailedRowsError(
            f"{failed.total():,} of {asked.found.rows:,} documents have no answer ({told}); say "
            f"what becomes of them: --on-error keep or drop, or filter.on_error in the spec"
        )


def _write(
    asked: _Filter, left: Sequence[NamedShard], shards: Mapping[str, Shard], there: frozenset[str]
) -> int:
    """Writes what is missing and then the manifest; how many objects were created."""
    options = asked.spec.input.storage_options

    def write_one(named: NamedShard) -> int:
        made = filter_shard(asked.store, named, shards[named.sid], options, asked.split)
        return _create(asked, named, made, there)

    with ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="filter") as pool:
        created = sum(pool.map(write_one, left))
    return created + _publish(asked)


def _create(asked: _Filter, named: NamedShard, made: FilteredShard, there: frozenset[str]) -> int:
    stores = (asked.dropped, asked.kept, asked.kept)
    data = (made.dropped, made.kept, canonical_json(made.counts.to_json()))
    new = zip(stores, asked.keys(named), data, strict=True)
    return sum(store.create(key, content) for store, key, content in new if key not in there)


def _publish(asked: _Filter) -> int:
    """The manifest; StorageError unless every document of the snapshot was kept or dropped."""
    parts = [
        counts_from_json(json.loads(asked.kept.read(asked.layout.counts_key(shard))))
        for shard in asked.found.shards
    ]
    counts = total(parts)
    rows = counts.all.kept.documents + counts.all.dropped.documents
    if rows != asked.found.rows:
        raise StorageError(
            f"{asked.kept.url}/{asked.layout.counts_folder}: {rows} documents were kept or dropped "
            f"of {asked.found.rows}; delete what lies there and filter again"
        )
    return int(
        asked.kept.create(asked.layout.manifest_key, canonical_json(_manifest(asked, parts)))
    )


def _manifest(asked: _Filter, parts: Sequence[Counts]) -> dict[str, Any]:
    found, layout = asked.found, asked.layout
    files = [
        {
            "input": shard.path,
            "start_row": shard.start_row,
            "kept": layout.kept_key(shard),
            "kept_rows": part.all.kept.documents,
            "dropped": layout.dropped_key(shard),
            "dropped_rows": part.all.dropped.documents,
        }
        for shard, part in zip(found.shards, parts, strict=True)
    ]
    return {
        "format": FORMAT,
        "id": layout.id,
        "spec": asked.spec.name,
        "output": asked.store.url,
        "snapshot": found.number,
        "tasks": {name: task.fp for name, task in found.tasks.items()},
        "keep": asked.split.rule.keep,
        "on_error": asked.split.on_error,
        "by": list(asked.split.by),
        "counts": total(parts).to_json(),
        "files": files,
    }
