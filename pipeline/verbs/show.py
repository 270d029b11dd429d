"""Example rows of an output, with the start of their texts. Entry point: `show`.

The choice is stable: it depends on the hashes of shards and texts alone, and is spread over shards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
from pydantic import InstanceOf, PlainSerializer

from pipeline.errors import Option
from pipeline.filters.excerpts import excerpts
from pipeline.filters.labelled import current_labels, warn_of_older_answers, with_text
from pipeline.ledger.flat import flat_columns, flatten, json_rows
from pipeline.ledger.rows import aligned_batches, asked_rows, wide_schema
from pipeline.ledger.snapshots import Contents
from pipeline.options import ShowOptions
from pipeline.sources.rule import Rule
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, open_store

TEXT_CHARS = 500  # of each text; a text may be very long


def _flat_rows(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    return list(json_rows(flatten(rows, flat_columns(rows.schema))))


@dataclass(frozen=True, slots=True)
class Examples:
    """Some rows of a snapshot, in the input's order. The JSON form has flat columns."""

    spec: str
    snapshot: int
    documents: int  # of the snapshot
    # Of `open_labels`, with the start of each text.
    rows: Annotated[InstanceOf[pa.RecordBatch], PlainSerializer(_flat_rows)]


def show(spec: JobSpec, options: ShowOptions, *, cache_dir: Path) -> Examples:
    """At most `options.n` rows of the spec's last snapshot that satisfy `options.where`.

    SpecError if the condition is wrong. StorageError if a text is no longer what was labelled.
    """
    store = open_store(spec.output, spec.storage_options)
    contents = current_labels(spec, store)
    warn_of_older_answers(spec, store, contents, cache_dir)
    schema = wide_schema(contents, list(contents.tasks))
    rule = None if options.where is None else Rule(options.where, schema, place=Option("where"))
    rows = _chosen(store, contents, schema, rule, options.n)
    shown = excerpts(store, contents, rows, spec.input.storage_options, chars=TEXT_CHARS)
    texts = pa.array([excerpt.text for excerpt in shown], pa.large_string())
    return Examples(spec.name, contents.number, contents.asked, with_text(rows, texts))


def _chosen(
    store: Store, contents: Contents, schema: pa.Schema, rule: Rule | None, n: int
) -> pa.RecordBatch:
    """The chosen rows: of at least `n` shards, those whose texts have the smallest hashes."""
    shuffled = replace(contents, files=contents.files.sort_by("sid"))
    candidates = [schema.empty_table()]
    count = 0
    for shards_read, batch in enumerate(aligned_batches(store, shuffled, schema), start=1):
        rows = asked_rows(contents, batch)
        rows = rows if rule is None else rows.filter(rule.verdicts(rows))
        candidates.append(_smallest_hashes(pa.Table.from_batches([rows]), n))
        count += rows.num_rows
        if count >= n and shards_read >= n:
            break
    chosen = _smallest_hashes(pa.concat_tables(candidates), n)
    in_order = chosen.sort_by([("path", "ascending"), ("row", "ascending")])
    return pa.RecordBatch.from_struct_array(in_order.to_struct_array().combine_chunks())


def _smallest_hashes(rows: pa.Table, n: int) -> pa.Table:
    keys = [(name, "ascending") for name in ("content_hash", "path", "row")]
    return rows.sort_by(keys).slice(0, n)
