"""The work that tries failed rows again. Entry point: `with_retries`."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.ledger.cells import Committed, WorkItem, committed
from pipeline.ledger.failed_rows import READ_THREADS, Counts, failed_mask
from pipeline.ledger.keys import documents_key
from pipeline.ledger.label_files import read_file
from pipeline.ledger.snapshots import last_published, published_counts
from pipeline.runtime.job import Job
from pipeline.runtime.plan import Plan, with_known
from pipeline.sources.documents import OK
from pipeline.sources.shards import Shard
from pipeline.stores.store import Store


def with_retries(job: Job, store: Store, planned: Plan) -> Plan:
    """The plan, with a work item for each finished shard with readable rows that failed.

    No task is asked again about a row that it answered. Label files in which no row failed, by the
    counts of the last snapshot, are not read.
    """
    last = last_published(store, job.spec.name, skip_damaged=True)
    known = published_counts(store, last, planned.done)
    # — where several stages make the answers, those of the stages are stored
    staged = [step for step in job.steps if step.thresholds is not None]
    read = {
        step.version: committed(store, {step.task: step.fingerprint.id}, None) for step in staged
    }
    read |= {step.version: planned.done for step in job.steps if step.thresholds is None}
    retry_of = partial(_retry_of, job, store, planned.done, read, known)
    with ThreadPoolExecutor(READ_THREADS) as pool:
        retries = pool.map(retry_of, planned.shards)
        items = (*planned.work_items, *(item for item in retries if item is not None))
    return replace(planned, work_items=items)


def _retry_of(
    job: Job,
    store: Store,
    done: Committed,
    read: Mapping[str, Committed],
    known: Counts,
    shard: Shard,
) -> WorkItem | None:
    """The retry of a shard, which takes the answers that are there from the files in `read`.

    A task whose condition names one that is tried again is tried again, too.
    """
    sid = shard.id
    if sid not in done.documents:
        return None
    columns = ["doc_id", "status"]
    readable: frozenset[str] | None = None
    retried: list[str] = []
    for task in (task for task in done.fp if sid in done.labels[task]):
        key = done.label_key(task, sid)
        if not {*retried}.isdisjoint(job.named_by(task)):
            retried.append(task)
            continue
        if key in known and not known[key].failed:
            continue
        answers = read_file(store, key, columns)
        is_failed = pa.array(failed_mask(answers.column("status")))
        failed = answers.column("doc_id").filter(is_failed).to_pylist()
        if failed and readable is None:
            documents = read_file(store, documents_key(sid), columns)
            is_ok = pc.equal(documents.column("status").cast(pa.string()), OK)
            readable = frozenset(documents.filter(is_ok).column("doc_id").to_pylist())
        if readable is not None and not readable.isdisjoint(failed):
            retried.append(task)
    if not retried:
        return None
    sources = {
        step.version: (read[step.version].label_key(step.task, sid),)
        for step in job.steps
        if step.task in retried and sid in read[step.version].labels[step.task]
    }
    retry = max(done.retry(task, sid) for task in retried) + 1
    item = WorkItem(shard, tuple(retried), documents=False, sources=sources, retry=retry)
    return with_known(job, item, done)
