"""The work that tries failed rows again. Entry point: `with_retries`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

import pyarrow.compute as pc

from pipeline.ledger.cells import Committed, WorkItem
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
    retries = [
        _retry_of(job, planned.done, shard, tasks[shard.id])
        for shard in planned.shards
        if shard.id in tasks and shard.id in planned.done.documents
    ]
    return replace(planned, work_items=(*planned.work_items, *retries))


def _retry_of(job: Job, done: Committed, shard: Shard, failed: Collection[str]) -> WorkItem:
    """The retry of a shard; a task whose condition names one that is tried again is, too."""
    sid = shard.id
    retried: list[str] = []
    for task in (task for task in done.fp if sid in done.labels[task]):
        if task in failed or not {*retried}.isdisjoint(job.named_by(task)):
            retried.append(task)
    retry = max(done.retry(task, sid) for task in retried) + 1
    return with_known(job, WorkItem(shard, tuple(retried), documents=False, retry=retry), done)
