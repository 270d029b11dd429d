"""Reads the documents of shards from the input, with the answers that the output has of them.

Entry points: `output_of`, `read_shard`, `with_texts`, and `commit_documents` for what is known of a
shard before it is labelled: ids, hashes and lengths of its texts. Imports neither torch nor Ray.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import StorageError
from pipeline.ledger.attempts import Attempts, attempt_name, check_shown
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS, Bools, structs
from pipeline.ledger.counts import Counts, ShardCounts
from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.keys import documents_key
from pipeline.ledger.label_files import commit_shard, read_file, remedy
from pipeline.ledger.reuse import StoredAnswers
from pipeline.runtime.conditions import inside
from pipeline.runtime.job import Job
from pipeline.sources.documents import OK
from pipeline.sources.source import check_content, read_documents
from pipeline.stores.store import Store, open_store


def output_of(job: Job) -> Store:
    """The output's store on a worker; StorageError if that, or the input, is not the driver's."""
    store = open_store(job.spec.output, job.spec.storage_options)
    check_shown(store, job.run.shown)
    if folder := job.run.input_folder:
        try:  # — a disk that is not mounted leaves an empty folder
            has_files = bool(os.listdir(folder))
        except OSError as error:  # — of a folder that may not be listed, files may be read
            has_files = isinstance(error, PermissionError)
        if not has_files:
            raise StorageError(
                f"{folder}: the input is not on this machine; mount the driver's folder at this "
                f"path, or name an s3:// or gs:// input"
            )
    return store


@dataclass(frozen=True, slots=True)
class ReadShard:
    """A shard's documents as they were read, and the answers that they already have."""

    work: WorkItem
    documents: pa.Table  # with the columns of a documents file, or also with texts and images
    inside: Bools  # [docs]: whether the condition of the run accepts the document
    undecided: int  # rows on which it cannot be computed
    # By version of a task: [docs] rows of label files, null without an answer.
    answers: Mapping[str, pa.StructArray]
    reused: Mapping[str, int]  # by version, how many of these are of other shards
    # By task, of those that only conditions name: [docs] rows of their label files.
    known: Mapping[str, pa.StructArray]


def read_shard(job: Job, store: Store, work: WorkItem, attempts: Attempts) -> ReadShard:
    """The shard of a work item, without texts where the output has its documents file."""
    options = job.spec.input.storage_options
    stored: dict[str, pa.StructArray] = {}
    reused: dict[str, int] = {}
    if work.documents:
        documents = pa.concat_tables(_read_slices(job, work, attempts))
    else:
        documents = read_file(store, documents_key(work.shard.id), list(DOCUMENTS_FILE_COLUMNS))
        stored_answers = StoredAnswers(store, work.shard, documents, is_retry=work.retry > 0)
        for version, sources in work.sources.items():
            rows, reused[version] = stored_answers.find(sources)
            if rows is not None:
                stored[version] = rows
    chosen, undecided = inside(work.shard, job.run.limit, documents, options)
    known = {task: _rows(store, key, documents) for task, key in work.known.items()}
    return ReadShard(work, documents, chosen, undecided, stored, reused, known)


def with_texts(job: Job, store: Store, shard: ReadShard, attempts: Attempts) -> ReadShard:
    """The same shard, with the texts that are read from the input."""
    documents = pa.concat_tables(_read_slices(job, shard.work, attempts))
    if not documents["doc_id"].equals(shard.documents["doc_id"]):
        raise StorageError(
            f"{store.url}/{documents_key(shard.work.shard.id)}: its doc_id are not those of "
            f"{shard.work.shard.path}; nothing was committed; `assay verify` reports more"
        )
    return replace(shard, documents=documents)


def commit_documents(job: Job, work: WorkItem) -> ShardCounts:
    """Commits the documents file of a shard; the number of rows, and whether the file is new."""
    store = output_of(job)
    attempts = Attempts(store, attempt_name(job.fp, work), job.run.id)
    slices = _read_slices(job, work, attempts)
    documents = pa.concat_tables([part.select(DOCUMENTS_FILE_COLUMNS) for part in slices])
    with committing(attempts):
        made = commit_shard(store, work.shard, documents, [], since=job.run.since)
    read = Counts({("rows", OK): documents.num_rows})
    return ShardCounts(work.shard.id, (), read, tuple(made))


def committing(attempts: Attempts) -> AbstractContextManager[None]:
    """Marks that the shard's files are built and created; see `Attempts.surviving`."""
    fix = "memory is short, or the output does not answer: use a machine with more memory"
    return attempts.surviving("committing", fix)


def readable(documents: pa.Table, inside: Bools) -> Bools:
    """[docs] whether a model may be asked about the document."""
    return inside & np.array(pc.equal(documents.column("status").cast(pa.string()), OK), np.bool_)


def _rows(store: Store, key: str, documents: pa.Table) -> pa.StructArray:
    """[docs] the rows of a label file of the shard."""
    file = read_file(store, key, None)
    if not file["doc_id"].equals(documents["doc_id"]):
        raise StorageError(
            f"{store.url}/{key}: its doc_id are not those of its shard; {remedy(key)}"
        )
    return structs(file.drop_columns(["doc_id"]))


def _read_slices(job: Job, work: WorkItem, attempts: Attempts) -> Iterator[pa.Table]:
    """The documents of the shard, a part at a time.

    StorageError if the input has changed since it was listed, or if its readers keep dying.
    """
    fix = (
        "the file crashes its reader, or memory is short: rewrite or remove the file, or use a "
        "machine with more memory"
    )
    with attempts.surviving("reading", fix):
        failpoint(f"reading {work.shard.path}")
        for documents in read_documents(work.shard, job.spec.input.storage_options):
            yield documents
            del documents  # the text of one part is freed before the next one is read
    check_content(work.shard, Path(job.cache_dir), job.run.began)
