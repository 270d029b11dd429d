"""The work that tries failed rows again. Entry point: `with_retries`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

import pyarrow.compute as pc

from pipeline.ledger.cells import Committed, WorkItem, committed
from pipeline.ledger.snapshots import counted_files
from pipeline.runtime.job import Job
from pipeline.runtime.plan import Plan, with_known
from pipeline.sources.shards import Shard
from pipeline.stores.store import Store


def with_retries(job: Job, store: Store, planned: Plan) -> Plan:
    """The plan, with a work item for each finished shard with readable rows that failed.

    No task is asked again about a row that it answered. No file is read whose counts are known.
    """
    files = counted_files(store, job.spec.name, planned.shards, planned.done)
    failed = files.filter(pc.greater(files["to_retry"], 0)).select(["sid", "task"])
    tasks = defaultdict[str, set[str]](set)  # by shard
    for file in failed.to_pylist():
        tasks[file["sid"]].add(file["task"])
    # — where several stages make the answers, those of the stages are stored
    staged = [step for step in job.steps if step.thresholds is not None]
    read = {
        step.version: committed(store, {step.task: step.fingerprint.id}, None) for step in staged
    }
    read |= {step.version: planned.done for step in job.steps if step.thresholds is None}
    retries = [
        _retry_of(job, planned.done, read, shard, tasks[shard.id])
        for shard in planned.shards
        if shard.id in tasks and shard.id in planned.done.documents
    ]
    return replace(planned, work_items=(*planned.work_items, *retries))


def _retry_of(
    job: Job,
    done: Committed,
    read: Mapping[str, Committed],
    shard: Shard,
    failed: Collection[str],
) -> WorkItem:
    """The retry of a shard, which takes the answers that are there from the files in `read`.

    A task whose condition names one that is tried again is tried again, too.
    """
    sid = shard.id
    retried: list[str] = []
    for task in (task for task in done.fp if sid in done.labels[task]):
        if task in failed or not {*retried}.isdisjoint(job.named_by(task)):
            retried.append(task)
    sources = {
        step.version: (source,)
        for step in job.steps
        if step.task in retried
        and (source := read[step.version].source(step.task, sid)) is not None
    }
    retry = max(done.retry(task, sid) for task in retried) + 1
    item = WorkItem(shard, tuple(retried), documents=False, sources=sources, retry=retry)
    return with_known(job, item, done)
