"""Example rows of an output, with the start of their texts. Entry point: `show`.

The choice is stable: it depends on the hashes of shards and texts alone, and is spread over shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import StorageError
from pipeline.filters.labelled import current_labels, labelled_texts, with_text
from pipeline.ledger.cuts import logged_shards
from pipeline.ledger.rows import DOCUMENT_SCHEMA, aligned_batches, read_shard, wide_schema
from pipeline.ledger.snapshots import Contents
from pipeline.options import ShowOptions
from pipeline.sources.rule import Rule
from pipeline.sources.shards import Shard
from pipeline.sources.streams import Options
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, open_store

TEXT_CHARS = 500  # of each text; a text may be very long
_PLACES = pa.schema([DOCUMENT_SCHEMA.field(name) for name in ("content_hash", "row")])


@dataclass(frozen=True, slots=True)
class Examples:
    """Some rows of a snapshot, in the input's order."""

    spec: str
    snapshot: int
    documents: int  # of the snapshot
    rows: pa.RecordBatch  # of `open_labels`, with the start of each text


def show(spec: JobSpec, options: ShowOptions, *, cache_dir: Path) -> Examples:
    """At most `options.n` rows of the spec's last snapshot that satisfy `options.where`.

    SpecError if the condition is wrong. StorageError if a text is no longer what was labelled.
    """
    store = open_store(spec.output, spec.storage_options)
    contents = current_labels(spec, store)
    schema = wide_schema(contents, list(contents.tasks))
    rule = None if options.where is None else Rule(options.where, schema, place="--where")
    rows = _chosen(store, contents, schema, rule, options.n)
    texts = _texts(store, contents, rows, spec.input.storage_options)
    return Examples(spec.name, contents.number, contents.rows, with_text(rows, texts))


def _chosen(
    store: Store, contents: Contents, schema: pa.Schema, rule: Rule | None, n: int
) -> pa.RecordBatch:
    """The chosen rows: of at least `n` shards, those whose texts have the smallest hashes."""
    shuffled = replace(contents, shards=tuple(sorted(contents.shards, key=lambda s: s.sid)))
    candidates = [schema.empty_table()]
    count = 0
    for shards_read, batch in enumerate(aligned_batches(store, shuffled, schema), start=1):
        rows = batch if rule is None else batch.filter(rule.verdicts(batch))
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


def _texts(
    store: Store, contents: Contents, rows: pa.RecordBatch, options: Options
) -> pa.Array:  # [rows]
    """The start of each row's text; null where the row has no text."""
    places = list(zip(rows.column("path").to_pylist(), rows.column("row").to_pylist(), strict=True))
    unread: dict[str, list[int]] = {}  # by path, the rows of the file
    for path, row in places:
        unread.setdefault(path, []).append(row)
    # — from the end, because a shard's rows are those from its first on; a slice has some of them
    chosen = {}
    for named in sorted(contents.shards, key=lambda shard: shard.start_row, reverse=True):
        left = unread.get(named.path, ())
        if of_shard := [row for row in left if row >= named.start_row]:
            chosen[named.sid] = named, of_shard
            unread[named.path] = [row for row in left if row < named.start_row]
    shards = logged_shards(store, chosen)
    texts: dict[tuple[str, int], str | None] = {}
    for sid, (named, of_shard) in chosen.items():
        if sid not in shards:
            raise StorageError(
                f"{store.url}/inputs: does not have the shard {sid} of {named.path}; restore it"
            )
        documents = read_shard(store, named, schema=_PLACES, tasks=())
        stored = documents.column("row").to_pylist()
        of_shard = [index for index, row in enumerate(stored) if row in of_shard]
        hashes = documents.column("content_hash")
        for index, text in _starts(shards[sid], options, hashes, of_shard):
            texts[named.path, stored[index]] = text
    return pa.array([texts[place] for place in places], pa.large_string())


def _starts(
    shard: Shard,
    options: Options,
    hashes: pa.Array,  # [docs of the shard]
    chosen: Sequence[int],  # docs of the shard, ascending
) -> Iterator[tuple[int, str | None]]:
    """The start of the text of each chosen document; the shard is read up to the last one."""
    left, first = deque(chosen), 0
    for texts in labelled_texts(shard, options, hashes):
        while left and left[0] < first + len(texts):
            row = left.popleft()
            yield row, pc.utf8_slice_codeunits(texts[row - first], 0, TEXT_CHARS).as_py()
        first += len(texts)
        if not left:
            return
