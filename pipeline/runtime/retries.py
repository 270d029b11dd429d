"""The work that tries failed rows again. Entry point: `with_retries`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.ledger.cells import Committed, Source, WorkItem, committed, version_name
from pipeline.ledger.failed_rows import NO_COUNTS, READ_THREADS, Counts, failed_mask
from pipeline.ledger.label_files import read_file
from pipeline.runtime.job import Job, Plan
from pipeline.runtime.outcome import published_counts
from pipeline.sources.documents import OK
from pipeline.sources.shards import Shard
from pipeline.stores.store import Store


def with_retries(job: Job, store: Store, planned: Plan) -> Plan:
    """The plan, with the work that tries failed rows again."""
    known = published_counts(store, job.spec.name, planned.done)
    retries = retry_items(job, store, planned.shards, planned.done, known)
    return replace(planned, work_items=(*planned.work_items, *retries))


def retry_items(
    job: Job, store: Store, shards: Sequence[Shard], done: Committed, known: Counts = NO_COUNTS
) -> list[WorkItem]:
    """A work item for each finished shard with readable rows that failed.

    No task is asked again about a row that it answered. Label files in which no row failed, by the
    `known` counts, are not read.
    """
    in_stages = {task.name for task in job.spec.in_stages}
    stages = [
        committed(store, {t: f for t, f in reader.fp.items() if t in in_stages}, None)
        for reader in job.stages
    ]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        items = pool.map(partial(_retry_of, store, [done, *stages], known), shards)
        return [item for item in items if item is not None]


def _retry_of(
    store: Store, versions: Sequence[Committed], known: Counts, shard: Shard
) -> WorkItem | None:
    """The retry of a shard; of `versions` the first has the tasks' own files, others of stages."""
    cell, done = shard.cell, versions[0]
    if shard.id not in done.documents:
        return None
    counted = {task: known.get(task, {}).get(cell) for task in done.fp if cell in done.labels[task]}
    tasks = [task for task, own in counted.items() if own is None or own.failed]
    readable: frozenset[str] | None = None
    retried = []
    for task in tasks:
        columns = ["doc_id", "status"]
        answers = read_file(store, done.label_file(task, cell).key, columns)
        failed = answers.filter(pa.array(failed_mask(answers))).column("doc_id").to_pylist()
        if failed and readable is None:
            documents = read_file(store, done.documents_file(shard.id).key, columns)
            is_ok = pc.equal(documents.column("status").cast(pa.string()), OK)
            readable = frozenset(documents.filter(is_ok).column("doc_id").to_pylist())
        if readable is not None and not readable.isdisjoint(failed):
            retried.append(task)
    if not retried:
        return None
    sources = {
        version_name(task, version.fp[task]): tuple(
            Source(shard.id, version.label_file(task, each).key)
            for each in (version.cells(task, shard.id) if number else [cell])
        )
        for number, version in enumerate(versions)
        for task in retried
        if task in version.fp
    }
    retry = max(done.retry(task, cell) for task in retried) + 1
    return WorkItem(shard, tuple(retried), documents=False, sources=sources, retry=retry)
