"""The documents that a spec's last snapshot has labels of, joined with their texts in the input.

Entry points: `current_labels` for the snapshot; `labelled_shards`, `labelled_texts` and `with_text`
for the input. A text is read again only if it is the text that was labelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.errors import StorageError
from pipeline.ledger.cuts import cut_before
from pipeline.ledger.rows import DOCUMENT_SCHEMA, TEXT_COLUMN
from pipeline.ledger.snapshots import Contents, last_contents
from pipeline.sources.shards import Shard
from pipeline.sources.slices import read_inside
from pipeline.sources.source import find_objects
from pipeline.sources.streams import Options
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store


def current_labels(spec: JobSpec, store: Store) -> Contents:
    """The spec's last snapshot; StorageError if it has other tasks or labels than the spec."""
    contents = last_contents(store, spec.name)
    if contents.tasks.keys() != {task.name for task in spec.tasks} or any(
        contents.tasks[task.name].labels != tuple(task.labels) for task in spec.tasks
    ):
        raise StorageError(
            f"{store.url}: snapshot {contents.number} of {spec.name} has other tasks or labels "
            f"than the spec has now; run `assay run` first"
        )
    return contents


def identity_of(contents: Contents) -> dict[str, Any]:
    """JSON that changes with each answer and input file, and not with the snapshot's number."""
    return {
        "tasks": {name: task.fp for name, task in contents.tasks.items()},
        "shards": [
            [shard.path, shard.start_row, shard.rows, *(file.key for file in shard.files)]
            for shard in contents.shards
        ],
    }


def labelled_shards(
    spec: JobSpec, store: Store, contents: Contents, cache_dir: Path
) -> tuple[dict[str, Shard], int]:
    """The snapshot's shards in the input by id, and the number of files that it does not know.

    StorageError if the input has another version of a labelled file by now.
    """
    source = spec.input
    objects = find_objects(source.path, cache_dir, source.storage_options, output=store.url)
    shards = cut_before(store, objects, source.columns).shards
    of_slice = (replace(shard, slice=contents.slice) for shard in shards)
    by_sid = {sid: shard for shard in of_slice for sid in (shard.id, shard.earlier_id)}
    for shard in contents.shards:
        if shard.sid not in by_sid:
            raise StorageError(
                f"{shard.path}: is gone, or differs from what snapshot {contents.number} "
                f"labelled; run `assay run` to label the input as it is now"
            )
    paths = {item.path for item in objects}
    labelled = {shard.path for shard in contents.shards}
    empty = paths - {shard.path for shard in shards}
    return by_sid, len(paths - labelled - empty)


def labelled_texts(
    shard: Shard,
    options: Options,
    hashes: pa.Array,  # [docs]: of the texts that were labelled
) -> Iterator[pa.Array]:
    """The texts of `labelled_documents`: large strings, null where a row has no text."""
    for documents in labelled_documents(shard, options, hashes):
        yield documents.column("text").combine_chunks()


def labelled_documents(
    shard: Shard,
    options: Options,
    hashes: pa.Array,  # [docs]: of the texts that were labelled
) -> Iterator[pa.Table]:
    """The shard's documents in order, slice by slice, with their images if they have any.

    StorageError if a document is not the one that was labelled.
    """
    rows = 0
    # — read with the id column, as for labelling: a damaged id page made its rows unreadable too
    for documents in read_inside(shard, options):
        read = documents.column("content_hash").combine_chunks()
        labelled = hashes.slice(rows, len(read))
        if not read.equals(labelled):
            pairs = zip(read.to_pylist(), labelled.to_pylist(), strict=False)
            row = next((n for n, (a, b) in enumerate(pairs) if a != b), len(labelled))
            raise StorageError(
                f"{shard.path}: row {shard.piece.start_row + rows + row} is not the text that was "
                f"labelled; run `assay run` to label the file as it is now"
            )
        yield documents
        rows += len(read)
    if rows != len(hashes):
        raise StorageError(
            f"{shard.path}: has {rows} rows, and {len(hashes)} were labelled; run `assay run` to "
            f"label the file as it is now"
        )


def with_text(rows: pa.RecordBatch, texts: pa.Array) -> pa.RecordBatch:
    """The rows of `open_labels` with the column `TEXT_COLUMN` before the tasks."""
    return rows.add_column(len(DOCUMENT_SCHEMA), pa.field(TEXT_COLUMN, pa.large_string()), texts)


def with_text_schema(rows: pa.Schema) -> pa.Schema:
    """The schema of `with_text`."""
    return rows.insert(len(DOCUMENT_SCHEMA), pa.field(TEXT_COLUMN, pa.large_string()))
