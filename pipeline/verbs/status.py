"""The progress of an output: done, missing and failed documents, the rate, and the time left.

Entry points: `status`, and `published_snapshots` for what changed. Neither starts Ray, loads a
model or writes anything, so they may be called from any machine while a run goes on. `status` reads
the plan, LISTs of the output, the log of counts, the spec's last snapshot, the label files that
these do not count, and one of each task that was reworded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.filters.older_answers import changed_since
from pipeline.ledger.cells import committed, equal_versions, stored_version
from pipeline.ledger.counts_log import counted
from pipeline.ledger.keys import label_folders, parse_key
from pipeline.ledger.snapshot_files import label_files_of
from pipeline.ledger.snapshots import Contents, SnapshotTask, contents, headers, last_snapshot
from pipeline.options import WorkOptions
from pipeline.runtime.dry_run import planned_output
from pipeline.runtime.job import Job
from pipeline.runtime.plan import Plan
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, open_store
from pipeline.verbs import ForPeople

logger = logging.getLogger(__name__)

# The rate is of this time. A shard takes about a minute of one worker, so it has several commits.
WINDOW_S = 900.0
# Workers that start together commit together: a rate over less time would be a multiple of theirs.
SHORTEST_S = 5.0
# A run commits every few minutes, so that no commit in an hour means that nothing ran.
IDLE_S = 3600.0

Commit = tuple[float, int]  # seconds since the epoch, documents


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """The documents of one task. The sum of the three is all documents."""

    done: int  # with an answer, or with an empty text
    missing: int  # not labelled yet
    failed: int  # labelled without an answer: quarantined, or with an error
    skipped: int = 0  # of those that are done: not accepted by the task's condition


@dataclass(frozen=True, slots=True)
class Status:
    """The progress of an output. Also its JSON form, without the fields that only people read."""

    output: ForPeople[str]
    documents: int  # of the whole input
    # Input files whose documents cannot be counted, with the reason.
    unreadable: ForPeople[tuple[str, ...]]
    to_read: int  # the most documents that the model reads: it reads no known text again
    snapshot: int | None  # the spec's last
    unpublished: ForPeople[int]  # documents of input shards that this snapshot does not have
    limit: ForPeople[str | None]  # the condition of the run that made this snapshot
    tasks: Mapping[str, TaskStatus]
    reused: Mapping[str, int]  # by task: documents with an answer of another shard's equal text
    docs_per_s: float | None  # None: nothing was committed recently
    eta_s: float | None  # 0 if nothing is missing; None without a rate


@dataclass(frozen=True, slots=True)
class PublishedSnapshot:
    """A snapshot, and what changed since the one before."""

    snapshot: int
    published: str  # ISO 8601
    documents: int
    limit: str | None  # the condition of the run
    changed: Mapping[str, tuple[str, ...]]  # by task, such as `question`, `the model` or `new`
    new_shards: int  # of the input
    removed_shards: int


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The spec's snapshots, the first one first."""

    output: str
    snapshots: tuple[PublishedSnapshot, ...]


def published_snapshots(spec: JobSpec) -> Snapshots:
    """Each snapshot of the spec, with what changed. Reads neither the input nor a label file."""
    store = open_store(spec.output, spec.storage_options)
    listed: list[PublishedSnapshot] = []
    before, known = Contents(0, spec.name, {}, pa.table({})), set[str]()
    for header in [*headers(store, spec.name)][::-1]:
        now = contents(store, header["number"])
        sids = {*now.files["sid"].unique().to_pylist()}
        changed = dict(_changed(store, before.tasks, now.tasks))
        shards = len(sids - known), len(known - sids)
        listed.append(
            PublishedSnapshot(now.number, now.created_at, now.rows, now.limit, changed, *shards)
        )
        before, known = now, sids
    return Snapshots(spec.output, tuple(listed))


def _changed(
    store: Store, before: Mapping[str, SnapshotTask], now: Mapping[str, SnapshotTask]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    for task in {**before, **now}:
        if task not in before or task not in now:
            yield task, ("new",) if task in now else ("removed",)
        elif before[task].fp != now[task].fp:
            versions = [stored_version(store, task, of[task].fp) for of in (before, now)]
            if changes := versions[1].changes(versions[0]):
                yield task, changes


def status(spec: JobSpec, *, cache_dir: Path) -> Status:
    """The progress of the spec's output, from what its store holds now.

    Raises:
        SpecError: The spec names missing files.
        RefusedError: The output is in a store of an unsupported kind.
        StorageError: The input or the output cannot be read.
    """
    store, job, planned = planned_output(spec, WorkOptions(), cache_dir)
    number = last_snapshot(store, spec.name)
    last = None if number is None else contents(store, number)
    files = counted(store, label_files(store, job, planned))
    shown = set() if last is None else {*last.files["sid"].unique().to_pylist()}
    if last:
        for line in changed_since(job, store, last):
            logger.warning("warning: %s", line)
    whole = files.filter(files["is_whole"])
    rate = docs_per_s(commits(store, whole, len(job.fp), whole["rows"]), time.time())
    missing = planned.missing_rows
    return Status(
        output=spec.output,
        documents=planned.rows,
        to_read=planned.rows_for_model,
        unreadable=planned.cuts.unreadable,
        snapshot=number,
        unpublished=sum(shard.rows for shard in planned.shards if shard.id not in shown),
        limit=last.limit if last else None,
        tasks={task: _task_status(planned, task, files) for task in job.fp},
        reused={
            task: _sum(files["taken_over"].filter(pc.equal(files["task"], task))) for task in job.fp
        },
        docs_per_s=rate,
        eta_s=(missing / rate if rate else None) if missing else 0.0,
    )


def docs_per_s(commits: Iterable[Commit], now_s: float) -> float | None:
    """The documents a second of the last quarter of an hour; None as of `_rate`."""
    return _rate((commit for commit in commits if commit[0] >= now_s - WINDOW_S), now_s)


def rate_of_last_run(commits: Iterable[Commit]) -> float | None:
    """The documents a second of the last run among these commits, as of `_rate`.

    A run ends where nothing was committed for an hour.
    """
    run: list[Commit] = []
    for commit in sorted(commits):
        if run and commit[0] - run[-1][0] > IDLE_S:
            run = []
        run.append(commit)
    return _rate(run, 0.0)


def _rate(commits: Iterable[Commit], until_s: float) -> float | None:
    """The documents a second since the first commit, until a time or the last commit.

    The documents of the first commit are left out, because the start of their work is not known.
    None with fewer than two commits, or within five seconds.
    """
    first, *others = sorted(commits) or [(0.0, 0)]
    if not others:
        return None
    # — the clock of the store may be ahead of this machine's
    seconds = max(until_s, others[-1][0]) - first[0]
    return None if seconds < SHORTEST_S else sum(of for _, of in others) / seconds


def _task_status(planned: Plan, task: str, files: pa.Table) -> TaskStatus:
    """The counts of one task; of a shard with several files, of the one that asks most rows."""
    own = files.filter(pc.equal(files["task"], task)).sort_by("skipped")
    names = ("rows", "failed", "skipped", "is_whole")
    by_shard = own.group_by("sid", use_threads=False).aggregate([(name, "first") for name in names])
    rows, failed, skipped, is_whole = (by_shard[f"{name}_first"] for name in names)
    # — rows that the condition of a run left out
    outside = _sum(skipped.filter(pc.invert(is_whole)))
    done = _sum(rows) - outside - _sum(failed)
    missing = planned.rows - done - _sum(failed)
    return TaskStatus(done, missing, _sum(failed), _sum(skipped.filter(is_whole)))


def _sum(values: pa.ChunkedArray) -> int:
    return pc.sum(values).as_py() or 0


def label_files(store: Store, job: Job, planned: Plan) -> pa.Table:
    """The current label file of each task and shard; without one, those of runs with conditions.

    Their answers count: a run of the whole does not ask these documents again.
    """
    done = planned.done
    tables = [_flagged(label_files_of(planned.shards, done), is_whole=True)]
    for task, version in job.fingerprints.items():
        missing = [shard for shard in planned.shards if shard.id not in done.labels[task]]
        sids = {shard.id for shard in missing}
        for fp in equal_versions(store, task, version) if missing else ():
            limited = committed(store, {task: fp}, sids, documents=done.documents)
            tables.append(_flagged(label_files_of(missing, limited), is_whole=False))
    return pa.concat_tables(tables)


def _flagged(files: pa.Table, *, is_whole: bool) -> pa.Table:
    return files.append_column("is_whole", pa.array([is_whole] * len(files), pa.bool_()))


def commits(
    store: Store, files: pa.Table, tasks: int, documents: pa.ChunkedArray
) -> Iterator[Commit]:
    """When each shard got the last of its files of all tasks, and the most documents of a file."""
    keys = files["key"].to_pylist()
    versions = {(key.task, key.fp) for key in map(parse_key, keys) if key is not None}
    times: dict[str, float] = {}
    for task, fp in versions:
        times |= {item.key: item.modified_s for item in store.list(label_folders(task, fp)[0])}
    at = pa.array([times.get(key) for key in keys], pa.float64())
    files = files.append_column("at", at).append_column("documents", documents)
    aggregations = [("at", "max"), ("documents", "max"), ("task", "count_distinct")]
    for shard in files.group_by("sid").aggregate(aggregations).to_pylist():
        if shard["task_count_distinct"] == tasks and shard["at_max"] is not None:
            yield shard["at_max"], shard["documents_max"]
