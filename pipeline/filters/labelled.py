"""The documents that a spec's last snapshot has labels of, joined with their texts in the input.

Entry points: `current_labels` for the snapshot, and `older_answers` for what the spec has changed
since; `labelled_shards`, `labelled_texts` and `with_text` for the input. A text is read again only
if it is the text that was labelled.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import AssayError, StorageError, one_line
from pipeline.hashes import parse_json
from pipeline.ledger.cells import stored_version
from pipeline.ledger.cuts import CutLog
from pipeline.ledger.label_files import METADATA_PREFIX
from pipeline.ledger.rows import DOCUMENT_SCHEMA, TEXT_COLUMN
from pipeline.ledger.snapshots import Contents, last_contents
from pipeline.runtime.job import job_of_output
from pipeline.runtime.weights import ModelFiles, locate
from pipeline.sources.shards import Shard
from pipeline.sources.source import find_objects, read_documents
from pipeline.sources.streams import Options
from pipeline.spec.model import NO_MODEL, ModelSpec
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store

logger = logging.getLogger(__name__)


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


def what_answered(store: Store, contents: Contents, task: str) -> dict[str, Any]:
    """The JSON values in the metadata of the task's first label file; {} without any document.

    `model` and `models` have the hashes of the weights, `models` by the name of each model; `spec`
    is the content of the fingerprint, and `versions` are those of the packages.
    """
    for shard in islice(contents.shards, 1):
        stored = pq.read_schema(io.BytesIO(store.read(shard.labels[task].key))).metadata or {}
        names = ("model", "models", "spec", "versions")
        keys = {name: f"{METADATA_PREFIX}{name}".encode() for name in names}
        return {name: parse_json(stored[key]) for name, key in keys.items() if key in stored}
    return {}


def warn_of_older_answers(spec: JobSpec, store: Store, contents: Contents, cache_dir: Path) -> None:
    """Logs each line of `older_answers`."""
    for line in older_answers(spec, store, contents, cache_dir):
        logger.warning("warning: %s", line)


def older_answers(
    spec: JobSpec, store: Store, contents: Contents, cache_dir: Path
) -> Iterator[str]:
    """A line for each task whose answers are of another wording or model than the spec's now.

    No model is fetched: one that is not a local file is compared by its name.
    """
    if not contents.shards:
        return
    models: dict[str, dict[str, Any]] = {name: {} for name in contents.tasks}
    with suppress(StorageError):  # who reads the file names it
        for name in contents.tasks:
            models[name] = what_answered(store, contents, name).get("models", {})
    hashes = {name: of_model for of_task in models.values() for name, of_model in of_task.items()}
    try:
        job = job_of_output(spec, store, cache_dir, locate=partial(_located, hashes=hashes))
    except AssayError as error:
        yield f"the answers cannot be compared with the spec as it is: {one_line(error)}"
        return
    for task, own in contents.tasks.items():
        stored = stored_version(store, task, own.fp)
        if job.fp[task] in (own.fp, stored.of_all.id):
            continue
        changed = job.fingerprints[task].changes(stored)
        by = f" of {', '.join(models[task])}" if models[task] else ""
        yield (
            f"{task}: these are answers{by} to an older wording of the spec, which differs in "
            f"{', '.join(changed)}. Run again (assay run) to have answers to the spec as it is"
        )


def _located(
    model: ModelSpec, cache_dir: Path, *, hashes: Mapping[str, Mapping[str, str]]
) -> ModelFiles:
    """The files of a local model; of another one those with which it answered, if it did."""
    if model == NO_MODEL or os.path.exists(os.path.expanduser(model.path)):
        return locate(model, cache_dir)
    return ModelFiles("none", model.path, model.revision, hashes.get(model.name, {}), 0)


def identity_of(contents: Contents) -> dict[str, Any]:
    """JSON that changes with each answer and input file, and not with the snapshot's number."""
    return {
        "tasks": {name: task.fp for name, task in contents.tasks.items()},
        "shards": [
            [shard.path, shard.start_row, shard.rows, shard.documents.key]
            + [file.key for file in shard.labels.values()]
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
    shards = CutLog(store).cuts_of([item.version(source.columns) for item in objects]).shards
    by_sid = {shard.id: shard for shard in shards}
    for shard in contents.shards:
        if shard.sid not in by_sid:
            raise StorageError(
                f"{shard.path}: is gone, or differs from what snapshot {contents.number} "
                f"labelled; run `assay run` to label the input as it is now"
            )
    paths = {item.path for item in objects}
    labelled = {*contents.files["path"].unique().to_pylist()}
    empty = paths - {shard.path for shard in shards}
    return by_sid, len(paths - labelled - empty)


def labelled_texts(
    shard: Shard,
    options: Options,
    hashes: pa.Array,  # [docs]: of the texts that were labelled
    rows: pa.Array,  # [docs]: in the input object
) -> Iterator[pa.Array]:
    """The texts of `labelled_documents`: large strings, null where a row has no text."""
    for documents in labelled_documents(shard, options, hashes, rows):
        yield documents.column("text").combine_chunks()


def labelled_documents(
    shard: Shard,
    options: Options,
    hashes: pa.Array,  # [docs]: of the texts that were labelled
    rows: pa.Array | None = None,  # [docs]: in the input object; None: all rows of the shard
) -> Iterator[pa.Table]:
    """These documents of the shard in order, a part at a time, with images if they have any.

    StorageError if a document is not the one that was labelled.
    """
    done, start = 0, shard.piece.start_row
    # — read with the id column, as for labelling: a damaged id page made its rows unreadable too
    for documents in read_documents(shard, options):
        end = start + len(documents)
        if rows is not None:
            own = rows.slice(done)
            places = pc.subtract(own.filter(pc.less(own, end)), start)
            documents = documents.take(places)
        read = documents.column("content_hash").combine_chunks()
        labelled = hashes.slice(done, len(read))
        if not read.equals(labelled):
            pairs = zip(read.to_pylist(), labelled.to_pylist(), strict=False)
            place = next((n for n, (a, b) in enumerate(pairs) if a != b), len(labelled))
            row = start + place if rows is None else rows[done + place]
            raise StorageError(
                f"{shard.path}: row {row} is not the text that was labelled; run `assay run` to "
                f"label the file as it is now"
            )
        yield documents
        done, start = done + len(read), end
    if done != len(hashes):
        raise StorageError(
            f"{shard.path}: has {done} rows, and {len(hashes)} were labelled; run `assay run` to "
            f"label the file as it is now"
        )


def with_text(rows: pa.RecordBatch, texts: pa.Array) -> pa.RecordBatch:
    """The rows of `open_labels` with the column `TEXT_COLUMN` before the tasks."""
    return rows.add_column(len(DOCUMENT_SCHEMA), pa.field(TEXT_COLUMN, pa.large_string()), texts)


def with_text_schema(rows: pa.Schema) -> pa.Schema:
    """The schema of `with_text`."""
    return rows.insert(len(DOCUMENT_SCHEMA), pa.field(TEXT_COLUMN, pa.large_string()))
