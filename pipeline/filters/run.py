"""The filtered corpus of a labelled one: the rows that a rule keeps, and those that it drops.

Entry points: `filter_corpus`, and `preview`, which writes nothing. Each file of a shard is built in
memory, read back and created once. A shard is done when both of its files exist; the corpus is
complete when the manifest exists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from glob import escape
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from pipeline.errors import FailedRowsError, Option, option_error
from pipeline.filters.decisions import Decisions, decided
from pipeline.filters.labelled import identity_of, labelled_documents
from pipeline.filters.layout import Layout, refuse_own_places, relative_paths
from pipeline.filters.older_answers import warn_of_older_answers
from pipeline.filters.result import Files, FilterResult, Written, result_of, stop_words
from pipeline.filters.rule import SnapshotRule
from pipeline.filters.writers import kept_rows
from pipeline.hashes import canonical_json, sha256_hex
from pipeline.ledger.label_files import to_parquet, verify
from pipeline.ledger.rows import TEXT_COLUMN
from pipeline.ledger.snapshot_files import NamedShard
from pipeline.options import FilterOptions, OnError
from pipeline.sources.shards import Shard
from pipeline.sources.source import check_unchanged
from pipeline.spec.locations import table_at
from pipeline.spec.schema import JobSpec
from pipeline.stores.local import LocalStore, drop_unfinished
from pipeline.stores.named_files import Target, open_target
from pipeline.stores.store import ATTEMPTS, Store, check_create_only, open_store

# Each thread holds a shard's texts and the file that is made of them.
SHARDS_AT_ONCE = 4
FORMAT = 3  # of the manifest and of the dropped files
CURRENT = "current.json"
WHY_COLUMN = "_dropped_by"  # no task has a name that begins with an underscore
_RESULT = TypeAdapter(FilterResult)


@dataclass(frozen=True, slots=True)
class _Filter:
    """One filter: a snapshot, a rule, and the store that it writes to."""

    rule: SnapshotRule
    on_error: OnError
    layout: Layout
    store: Store
    current: Target

    def keys(self, shard: NamedShard) -> tuple[str, str]:
        """The keys of a shard's files, in the order in which they are created."""
        return self.layout.dropped_key(shard), self.layout.kept_key(shard)


def preview(spec: JobSpec, options: FilterOptions, *, cache_dir: Path) -> FilterResult:
    """What the spec's filter would do; nothing is written.

    Raises as `filter_corpus`; the result reports documents without an answer that would stop the
    filter.
    """
    rule = SnapshotRule.of(spec)
    warn_of_older_answers(spec, rule.labelled.store, rule.labelled.contents, cache_dir)
    shards, _ = rule.labelled.shards(cache_dir)
    on_error = options.on_error or rule.rule.filter.on_error
    with decided(rule.rule, rule.labelled.batches(shards), on_error) as table:
        return result_of(rule, on_error, table)


def filter_corpus(spec: JobSpec, options: FilterOptions, *, cache_dir: Path) -> FilterResult:
    """Writes the filtered corpus of the spec's last snapshot; a second call writes nothing."""
    job = _prepare(spec, options)
    labelled, layout = job.rule.labelled, job.layout
    warn_of_older_answers(spec, labelled.store, labelled.contents, cache_dir)
    lists = (job.store.list(f"{name}/{layout.id}/") for name in ("kept", "filters", "dropped"))
    existing = frozenset(stored.key for stored in chain.from_iterable(lists))
    named = enumerate(labelled.contents.shards)
    todo = [(n, shard) for n, shard in named if not existing.issuperset(job.keys(shard))]
    created, new_files = 0, 0
    if todo or layout.manifest_key not in existing:
        check_create_only(job.store, place=Option("to"))
        shards, new_files = labelled.shards(cache_dir)
        with decided(job.rule.rule, labelled.batches(shards), job.on_error) as table:
            created = _write(job, table, todo, shards, existing)
    stored = _RESULT.validate_json(job.store.read(layout.manifest_key))
    kept_at, dropped_at = (f"{job.store.url}/{name}/{layout.id}" for name in ("kept", "dropped"))
    written = Written(
        kept=Files(kept_at, tuple(f"{escape(kept_at)}/**/*{s}" for s in layout.kept_suffixes())),
        dropped=Files(dropped_at, (f"{escape(dropped_at)}/**/*.parquet",)),
        current=job.current.url,
        manifest=f"{job.store.url}/{layout.manifest_key}",
        shards=len(labelled.contents.shards),
        created=created,
        new_files=new_files,
    )
    # — of an earlier snapshot with the same answers, maybe of another part of the input
    of = labelled.contents
    result = replace(
        stored,
        snapshot=of.number,
        missing_rows=of.missing_rows,
        missing_files=of.missing_files,
        limit=of.limit,
        written=written,
    )
    _point_to(result, job)
    return result


def _prepare(spec: JobSpec, options: FilterOptions) -> _Filter:
    """The filter, after every check that reads no documents."""
    to = options.folder()
    if table_at(to) is not None:
        raise option_error("to", "is a table; name a folder or a URL", to)
    refuse_own_places(spec, to)
    rule = SnapshotRule.of(spec)
    on_error = options.on_error or rule.rule.filter.on_error
    paths = {*rule.labelled.contents.files["path"].unique().to_pylist()}
    relative = relative_paths(spec.input.path, paths, spec.input.storage_options)
    layout = Layout(_filter_id(rule, on_error, relative), relative)
    target = rule.rule.filter.storage_options
    target_options = spec.storage_options if target is None else target
    store = open_store(to, target_options, place=Option("to"))
    if isinstance(store, LocalStore):
        drop_unfinished((store.root / ATTEMPTS).glob("create-*"))
    current = open_target(to, target_options).below(CURRENT)
    return _Filter(rule, on_error, layout, store, current)


def _filter_id(rule: SnapshotRule, on_error: OnError, relative: Mapping[str, str]) -> str:
    """Changes with each answer, input file, rule and name of a file.

    It does not change with the snapshot's number. The thresholds of a share follow from these: each
    filter with this id computes the same.
    """
    side = rule.rule.side
    content = {
        "format": FORMAT,
        **rule.rule.filter.model_dump(include={"keep", "drop_top"}),
        "on_error": on_error,
        **identity_of(rule.labelled.contents),
        "names": sorted(relative.values()),
        **({} if side is None else {"join": side.version, "on": side.on}),
    }
    return sha256_hex(canonical_json(content), 16)


def _write(
    job: _Filter,
    table: Decisions,
    todo: Sequence[tuple[int, NamedShard]],  # with the number of the shard
    shards: Mapping[str, Shard],
    existing: frozenset[str],
) -> int:
    """Writes the missing files and then the manifest; the number of created objects.

    FailedRowsError where documents without an answer stop the filter.
    """
    result = result_of(job.rule, job.on_error, table)
    if result.stops:
        raise FailedRowsError(stop_words(result.failed, result.documents))

    def write_one(numbered: tuple[int, NamedShard]) -> int:
        number, named = numbered
        files = split_shard(job.rule, table.of_shard(number), shards[named.sid], result)
        objects = zip(job.keys(named), files, strict=True)
        missing = ((key, content) for key, content in objects if key not in existing)
        return sum(job.store.create(key, content) is not None for key, content in missing)

    with ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="filter") as pool:
        created = sum(pool.map(write_one, todo))
    manifest = canonical_json(_manifest(job, table, result))
    return created + int(job.store.create(job.layout.manifest_key, manifest) is not None)


def split_shard(
    rule: SnapshotRule, documents: pa.Table, shard: Shard, result: FilterResult
) -> tuple[bytes, bytes]:
    """A file of the dropped rows of a shard and one of the kept rows; each row is in one of them.

    The dropped rows are as `open_labels` has them, with their texts and the reasons.
    """
    options = rule.labelled.spec.input.storage_options
    dropped = documents["_dropped"].combine_chunks()
    hashes, rows = (documents[name].combine_chunks() for name in ("content_hash", "row"))
    texts, first = [], 0
    for part in labelled_documents(shard, options, hashes, rows):
        texts.append(part["text"].combine_chunks().filter(dropped.slice(first, len(part))))
        first += len(part)
    dropped_rows, schema = documents.filter(dropped), rule.labelled.answers_schema
    table = dropped_rows.select(schema.names).cast(schema)
    table = table.append_column(TEXT_COLUMN, pa.chunked_array(texts, pa.large_string()))
    table = table.append_column(WHY_COLUMN, dropped_rows["_why"].dictionary_encode())
    metadata = {"rule": result.rule, "on_error": result.on_error}
    data = to_parquet(table, {**metadata, "shard": canonical_json(shard.to_json()).decode()})
    verify(data, table.column("doc_id"))
    kept_inside = np.zeros(shard.rows, np.bool_)  # a run with a condition has some of these rows
    kept_inside[rows.to_numpy() - shard.piece.start_row] = ~dropped.to_numpy(zero_copy_only=False)
    kept = kept_rows(shard, options, kept_inside)
    check_unchanged(shard, options)  # — the texts above are of an earlier read
    return data, kept


def _manifest(job: _Filter, table: Decisions, result: FilterResult) -> dict[str, Any]:
    """The result, and the files of each shard."""
    labelled, layout = job.rule.labelled, job.layout
    counts = ", ".join(f"count(*) filter ({which})" for which in ("not _dropped", "_dropped"))
    by_shard = table.rows(f"select _shard, {counts} from documents group by _shard")
    rows = {number: of for number, *of in by_shard}
    files = [
        {
            "input": shard.path,
            "start_row": shard.start_row,
            "kept": layout.kept_key(shard),
            "kept_rows": kept,
            "dropped": layout.dropped_key(shard),
            "dropped_rows": dropped,
        }
        for number, shard in enumerate(labelled.contents.shards)
        for kept, dropped in [rows.get(number, (0, 0))]
    ]
    return {
        "format": FORMAT,
        "id": layout.id,
        "spec": labelled.spec.name,
        "output": labelled.store.url,
        "tasks": {name: task.fp for name, task in labelled.contents.tasks.items()},
        **_RESULT.dump_python(result, mode="json", exclude={"written"}),
        "files": files,
    }


def _point_to(result: FilterResult, job: _Filter) -> None:
    """Writes `current.json`, last: the name that stays the same whatever the filter's id is."""
    assert result.written is not None
    content = {
        "format": FORMAT,
        "id": job.layout.id,
        "spec": job.rule.labelled.spec.name,
        "output": job.rule.labelled.store.url,
        "snapshot": result.snapshot,
        "rule": result.rule,
        "on_error": result.on_error,
        "complete": result.complete,
        "kept": asdict(result.written.kept),
        "dropped": asdict(result.written.dropped),
        "manifest": result.written.manifest,
    }
    data = json.dumps(content, indent=2).encode() + b"\n"
    if not job.current.exists() or job.current.read() != data:
        with job.current.replaced() as file:
            file.write_bytes(data)
