"""Reads the documents of shards from the input, and commits their documents files.

Entry points: `read_slices`, and `commit_documents` for what is known of a shard before it is
labelled: ids, hashes and lengths of its texts. Must import neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.ledger.attempts import Attempts, attempt_name
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS
from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.label_files import commit_shard
from pipeline.ledger.text_index import text_hashes
from pipeline.runtime.job import Job
from pipeline.sources.documents import OK
from pipeline.sources.slices import SliceMask, marked
from pipeline.sources.source import check_content, read_documents
from pipeline.stores.store import Store, open_store


def read_slices(job: Job, store: Store, work: WorkItem) -> Iterator[tuple[int, pa.Table]]:
    """The first row and the documents of each slice of the shard; one slice is held at a time.

    StorageError if the input has changed since it was listed, or if its readers keep dying.
    """
    path, piece = work.shard.path, work.shard.piece
    attempts = Attempts(store, attempt_name(job.fp, work), job.run_id)
    row = 0
    with attempts.reading(f"{path}: rows {piece.start_row} to {piece.end_row}"):
        failpoint(f"reading {path}")
        options = job.spec.input.storage_options
        mask = SliceMask(work.shard, options)
        texts = FirstOfTexts(work.texts) if work.texts else None
        for read in read_documents(work.shard, options):
            documents = mask.mark(read, row)
            if texts is not None:
                documents = texts.mark(documents)
            del read
            rows = documents.num_rows
            yield row, documents
            row += rows
            del documents  # the text of one slice is freed before the next slice is read
    check_content(work.shard, Path(job.cache_dir), job.began)


class FirstOfTexts:
    """Which documents of a shard are the first with one of these texts.

    Args:
        texts: The hashes of the texts, as `WorkItem.texts` has them.
    """

    def __init__(self, texts: bytes) -> None:
        self._left = np.frombuffer(texts, np.uint64)  # of texts that no document had yet

    def mark(self, documents: pa.Table) -> pa.Table:
        """The next documents of the shard; those that are not such are OUTSIDE."""
        readable = pc.equal(documents.column("status"), OK).to_numpy()
        hashes, firsts = np.unique(text_hashes(documents), return_index=True)
        chosen = np.isin(hashes, self._left)
        self._left = np.setdiff1d(self._left, hashes[chosen])
        inside = np.zeros(documents.num_rows, np.bool_)
        inside[np.flatnonzero(readable)[firsts[chosen]]] = True
        return marked(documents, inside)


def commit_documents(job: Job, work_items: Iterable[WorkItem]) -> tuple[int, int]:
    """Commits the documents files of these shards; the numbers of new files and of rows read."""
    store = open_store(job.spec.output, job.spec.storage_options)
    created = rows = 0
    for work in work_items:
        read = read_slices(job, store, work)
        documents = pa.concat_tables([each.select(DOCUMENTS_FILE_COLUMNS) for _, each in read])
        created += len(commit_shard(store, work.shard, documents, []))
        rows += documents.num_rows
    return created, rows
