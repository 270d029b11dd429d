"""How far an output is: done, missing and failed documents, the rate, and the time left.

Entry point: `status`. Starts no Ray, loads no model and writes nothing, so it may be called from
any machine while a run goes on. It reads the plan, LISTs of the output, and the label files.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pipeline.ledger.cells import CONCURRENT_LISTS
from pipeline.ledger.keys import label_folders, parse_key
from pipeline.ledger.snapshots import last_snapshot
from pipeline.runtime.job import Plan, least_work
from pipeline.runtime.outcome import READ_THREADS, failed_mask
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, open_store

# The rate is of this time. A shard takes about a minute of one worker, so it has several commits.
WINDOW_S = 900.0
# Workers that start together commit together: a rate over less time would be a multiple of theirs.
SHORTEST_S = 5.0

Commit = tuple[float, int]  # seconds since the epoch, documents


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """The documents of one task. The sum of the three is all documents."""

    done: int  # with an answer, or with an empty text
    missing: int  # not labelled yet
    failed: int  # labelled without an answer: quarantined, or with an error


@dataclass(frozen=True, slots=True)
class Status:
    """How far an output is."""

    output: str
    documents: int  # of the whole input
    unreadable: tuple[str, ...]  # input files whose documents cannot be counted, with the reason
    snapshot: int | None  # the spec's last
    tasks: Mapping[str, TaskStatus]
    docs_per_s: float | None  # None: nothing was committed recently
    eta_s: float | None  # 0 if nothing is missing; None without a rate


def status(spec: JobSpec, *, cache_dir: Path) -> Status:
    """How far the spec's output is, from what its store holds now.

    Args:
        spec: The job.
        cache_dir: Folder of models and file hashes.

    Returns:
        Counts of documents by task, the last snapshot, the rate and the time left.

    Raises:
        SpecError: The spec names missing files.
        RefusedError: The output is in a store of an unsupported kind.
        StorageError: The input or the output cannot be read.

    Examples:
        >>> status(load_spec("my.yaml"), cache_dir=Path("cache")).tasks["toxic"].missing
        0
    """
    store = open_store(spec.output, spec.storage_options)
    job, planned = least_work(spec, store, cache_dir)
    tasks = {task: _task_status(store, planned, task) for task in job.fp}
    rate = docs_per_s(_commits(store, planned, job.fp), time.time())
    missing = planned.missing_rows
    return Status(
        output=spec.output,
        documents=planned.rows,
        unreadable=planned.cuts.unreadable,
        snapshot=last_snapshot(store, spec.name),
        tasks=tasks,
        docs_per_s=rate,
        eta_s=(missing / rate if rate else None) if missing else 0.0,
    )


def docs_per_s(commits: Iterable[Commit], now_s: float) -> float | None:
    """The documents committed in the last quarter of an hour, divided by the time that they took.

    The time is counted from the first commit of the window, whose documents are left out: nobody
    knows when their work began. None with fewer than two commits, or within five seconds.
    """
    recent = sorted(commit for commit in commits if commit[0] >= now_s - WINDOW_S)
    if len(recent) < 2:
        return None
    began_s = recent[0][0]
    # — the clock of the store may be ahead of this machine's
    seconds = max(now_s, recent[-1][0]) - began_s
    if seconds < SHORTEST_S:
        return None
    return sum(documents for _, documents in recent[1:]) / seconds


def _task_status(store: Store, planned: Plan, task: str) -> TaskStatus:
    done = planned.done
    labelled = [shard for shard in planned.shards if shard.id in done.labels[task]]
    keys = [done.label_file(task, shard.id).key for shard in labelled]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        failed = sum(int(mask.sum()) for mask in pool.map(lambda k: failed_mask(store, k), keys))
    rows = sum(shard.rows for shard in labelled)
    return TaskStatus(done=rows - failed, missing=planned.rows - rows, failed=failed)


def _commits(store: Store, planned: Plan, fp: Mapping[str, str]) -> Sequence[Commit]:
    """When each shard got the last of its label files, and its documents."""
    with ThreadPoolExecutor(CONCURRENT_LISTS) as pool:
        listed = list(pool.map(lambda task: _label_times(store, task, fp[task]), fp))
    return [
        (max(times[shard.id] for times in listed), shard.rows)
        for shard in planned.shards
        if all(shard.id in times for times in listed)
    ]


def _label_times(store: Store, task: str, fp: str) -> dict[str, float]:
    """When each shard's label file was created, by shard id."""
    stored = ((parse_key(each.key), each) for each in store.list(label_folders(task, fp)[0]))
    return {key.sid: each.modified_s for key, each in stored if key}
