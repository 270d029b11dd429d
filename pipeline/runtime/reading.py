"""Reads the documents of shards from the input, with the answers that the output has of them.

Entry points: `output_of`, `read_shard`, and `commit_documents` for what is known of a shard before
it is labelled: ids, hashes and lengths of its texts. Must import neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import StorageError
from pipeline.ledger.attempts import Attempts, attempt_name, check_shown
from pipeline.ledger.cells import WorkItem, version_name
from pipeline.ledger.columns import DOCUMENTS_FILE_COLUMNS, Bools
from pipeline.ledger.counts import ShardCounts
from pipeline.ledger.failed_rows import counts_of
from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.keys import documents_key
from pipeline.ledger.label_files import commit_shard, read_file
from pipeline.ledger.reuse import StoredAnswers
from pipeline.runtime.job import Job
from pipeline.sources.documents import OK
from pipeline.sources.slices import SliceMask
from pipeline.sources.source import check_content, read_documents
from pipeline.stores.store import Store, open_store


def output_of(job: Job) -> Store:
    """The output's store on a worker; StorageError if it is not the driver's output."""
    store = open_store(job.spec.output, job.spec.storage_options)
    check_shown(store, job.shown)
    return store


@dataclass(frozen=True, slots=True)
class ReadShard:
    """A shard's documents as they were read, and the answers that they already have."""

    work: WorkItem
    # With the columns of a documents file; also with the texts and images, if some may be asked.
    documents: pa.Table
    inside: Bools  # [docs]: whether the document is in the slice
    # By version of a task: [docs] rows of label files, null without an answer.
    answers: Mapping[str, pa.StructArray]
    # By version: how many rows are of which other shard.
    reused: Mapping[str, Mapping[str, int]]
    undecided: int  # rows on which `--where` cannot be computed


def read_shard(job: Job, store: Store, work: WorkItem) -> ReadShard:
    """The shard of a work item; its input is opened only if a document may need an answer."""
    known = None
    stored: dict[str, pa.StructArray] = {}
    reused: dict[str, dict[str, int]] = {}
    if not work.documents:
        known = read_file(store, documents_key(work.shard.id), list(DOCUMENTS_FILE_COLUMNS))
        answers_of = StoredAnswers(store)
        for version, sources in work.sources.items():
            answers, counts = answers_of.find(work.shard, known, sources, is_retry=work.retry > 0)
            if answers is not None:
                stored[version], reused[version] = answers, dict(counts)
    mask = SliceMask(work.shard, job.spec.input.storage_options)
    read: Iterable[tuple[int, pa.Table]] = [(0, known)]
    if known is None or _has_open_rows(job, work, known, mask, stored):
        read = _read_slices(job, store, work)
    parts, inside = [], []
    for start, part in read:
        parts.append(part)
        inside.append(mask.inside(part, start))
    documents = pa.concat_tables(parts)
    if known is not None and not documents["doc_id"].equals(known["doc_id"]):
        raise StorageError(
            f"{store.url}/{documents_key(work.shard.id)}: its doc_id are not those of "
            f"{work.shard.path}; nothing was committed; `assay verify` reports more"
        )
    return ReadShard(work, documents, np.concatenate(inside), stored, reused, mask.failed)


def commit_documents(job: Job, work: WorkItem) -> ShardCounts:
    """Commits the documents file of a shard; the number of rows, and whether the file is new."""
    store = output_of(job)
    slices = _read_slices(job, store, work)
    documents = pa.concat_tables([part.select(DOCUMENTS_FILE_COLUMNS) for _, part in slices])
    made = commit_shard(store, work.shard, documents, [], since=job.since)
    files = {key: counts_of(documents["status"], {}, hash, job.since) for key, hash in made.items()}
    return ShardCounts(work.shard.id, documents.num_rows, {}, {}, {}, len(made), files=files)


def readable(documents: pa.Table, inside: Bools) -> Bools:
    """[docs] whether a model may be asked about the document."""
    return inside & np.array(pc.equal(documents.column("status").cast(pa.string()), OK), np.bool_)


def answered(answers: pa.StructArray | None, rows: int) -> Bools:
    """[rows] whether there is an answer."""
    if answers is None:
        return np.zeros(rows, np.bool_)
    return np.array(answers.is_valid(), np.bool_)


def _read_slices(job: Job, store: Store, work: WorkItem) -> Iterator[tuple[int, pa.Table]]:
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


def _has_open_rows(
    job: Job,
    work: WorkItem,
    known: pa.Table,
    mask: SliceMask,
    stored: Mapping[str, pa.StructArray],
) -> bool:
    """Whether a document may need an answer that the output does not have."""
    if len(job.readers) > 1:
        return bool(work.tasks)
    rows, fp = readable(known, mask.inside(known, 0)), job.readers[0].fp
    answers = [stored.get(version_name(task, fp[task])) for task in work.tasks if task in fp]
    return any((rows & ~answered(of_task, known.num_rows)).any() for of_task in answers)
