"""Reads the documents of shards from the input, and commits their documents files.

Entry points: `output_of`, `read_slices`, and `commit_documents` for what is known of a shard before
it is labelled: ids, hashes and lengths of its texts. Must import neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from pipeline.ledger.attempts import Attempts, attempt_name, check_shown
from pipeline.ledger.blocks import ShardCounts
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS
from pipeline.ledger.failed_rows import counts_of
from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.label_files import commit_shard
from pipeline.runtime.job import Job
from pipeline.sources.source import check_content, read_documents
from pipeline.stores.store import Store, open_store


def output_of(job: Job) -> Store:
    """The output's store on a worker; StorageError if it is not the driver's output."""
    store = open_store(job.spec.output, job.spec.storage_options)
    check_shown(store, job.shown)
    return store


def read_slices(job: Job, store: Store, work: WorkItem) -> Iterator[tuple[int, pa.Table]]:
    """The first row and the documents of each slice of the shard; one slice is held at a time.

    StorageError if the input has changed since it was listed, or if its readers keep dying.
    """
    path, piece = work.shard.path, work.shard.piece
    attempts = Attempts(store, attempt_name(job.fp, work), job.run_id)
    row = 0
    with attempts.reading(f"{path}: rows {piece.start_row} to {piece.end_row}"):
        failpoint(f"reading {path}")
        for documents in read_documents(work.shard, job.spec.input.storage_options):
            rows = documents.num_rows
            yield row, documents
            row += rows
            del documents  # the text of one slice is freed before the next slice is read
    check_content(work.shard, Path(job.cache_dir), job.began)


def commit_documents(job: Job, work: WorkItem) -> ShardCounts:
    """Commits the documents file of a shard; the number of rows, and whether the file is new."""
    store = output_of(job)
    slices = read_slices(job, store, work)
    documents = pa.concat_tables([part.select(DOCUMENTS_FILE_COLUMNS) for _, part in slices])
    made = commit_shard(store, work.shard, documents, [], since=job.since)
    files = {key: counts_of(documents["status"], {}, hash, job.since) for key, hash in made.items()}
    return ShardCounts(work.shard.id, documents.num_rows, {}, {}, {}, len(made), files=files)
