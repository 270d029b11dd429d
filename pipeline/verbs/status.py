"""How far an output is: done, missing and failed documents, the rate, and the time left.

Entry point: `status`. Starts no Ray, loads no model and writes nothing, so it may be called from
any machine while a run goes on. It reads the plan, LISTs of the output, the spec's last snapshot,
and the label files that this does not count.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from pipeline.ledger.cells import CONCURRENT_LISTS
from pipeline.ledger.columns import ROW
from pipeline.ledger.failed_rows import READ_THREADS, Counts, complete_counts, failed_mask
from pipeline.ledger.keys import label_folders, label_key, parse_key
from pipeline.ledger.label_files import read_file
from pipeline.ledger.snapshots import last_published, published_counts
from pipeline.runtime.dry_run import least_work
from pipeline.runtime.job import Plan
from pipeline.sources.shards import Shard, Slice
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, open_store
from pipeline.verbs import ForPeople

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


@dataclass(frozen=True, slots=True)
class Status:
    """How far an output is. Also its JSON form, without the fields that only people read."""

    output: ForPeople[str]
    documents: int  # of the whole input
    # Input files whose documents cannot be counted, with the reason.
    unreadable: ForPeople[tuple[str, ...]]
    snapshot: int | None  # the spec's last
    slice: ForPeople[Slice | None]  # the documents that this snapshot is limited to
    tasks: Mapping[str, TaskStatus]
    reused: Mapping[str, int]  # by task: documents with an answer of another shard's equal text
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
    last, done = last_published(store, spec.name), planned.done
    keys = {
        task: [done.label_key(task, s.cell) for s in planned.shards if s.cell in labels]
        for task, labels in done.labels.items()
    }
    known = published_counts(store, last, done)
    counts = complete_counts(store, chain.from_iterable(keys.values()), known)
    rate = docs_per_s(_commits(store, planned, job.fp), time.time())
    missing = planned.missing_rows
    return Status(
        output=spec.output,
        documents=planned.rows,
        unreadable=planned.cuts.unreadable,
        snapshot=None if last is None else last["number"],
        slice=Slice(**last["slice"]) if last is not None and "slice" in last else None,
        tasks={task: _task_status(store, planned, task, counts) for task in keys},
        reused={
            task: sum(counts[key].taken_over for key in of_task) for task, of_task in keys.items()
        },
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


def pace_of_last_run(commits: Iterable[Commit]) -> tuple[float, float] | None:
    """The seconds of the last run among these commits, and its documents per second.

    A run ends where nothing was committed for an hour. The documents of its first commit are left
    out: nobody knows when their work began. None with fewer than two commits, or within five
    seconds.
    """
    run: list[Commit] = []
    for commit in sorted(commits):
        if run and commit[0] - run[-1][0] > IDLE_S:
            run = []
        run.append(commit)
    seconds = run[-1][0] - run[0][0] if run else 0.0
    if seconds < SHORTEST_S:
        return None
    return seconds, sum(documents for _, documents in run[1:]) / seconds


def _task_status(store: Store, planned: Plan, task: str, counts: Counts) -> TaskStatus:
    """The counts of one task, of which `counts` has those of whole shards."""
    done = planned.done

    def counts_of(shard: Shard) -> tuple[int, int]:
        """The labelled documents, and the failed ones among them."""
        if shard.cell in done.labels[task]:
            return shard.rows, counts[done.label_key(task, shard.cell)].failed
        # — the answers of slices count: a run of the whole does not ask these documents again
        failed: dict[int, bool] = {}
        for key in done.label_keys(task, shard.id):
            file = read_file(store, key, [ROW, "status"])
            is_failed_row = failed_mask(file.column("status")).tolist()
            for row, is_failed in zip(file.column(ROW).to_pylist(), is_failed_row, strict=True):
                failed[row] = is_failed and failed.get(row, True)
        return len(failed), sum(failed.values())

    with ThreadPoolExecutor(READ_THREADS) as pool:
        pairs = list(pool.map(counts_of, planned.shards))
    labelled, failed = (sum(column) for column in zip(*pairs, strict=True))
    return TaskStatus(labelled - failed, planned.rows - labelled, failed)


def _commits(store: Store, planned: Plan, fp: Mapping[str, str]) -> Sequence[Commit]:
    """When each shard got the last of its label files, and its documents."""
    with ThreadPoolExecutor(CONCURRENT_LISTS) as pool:
        listed = list(pool.map(lambda task: label_times(store, task, fp[task]), fp))
    by_cell = [
        {key.cell: seconds for name, seconds in times.items() if (key := parse_key(name))}
        for times in listed
    ]
    shards = {shard.id: shard for shard in planned.shards}
    cells = set(by_cell[0]).intersection(*by_cell)

    def rows_of(cell: str) -> int:
        sid, _, part = cell.partition(".")
        if not part:
            return shards[sid].rows
        task = next(iter(fp))
        return len(read_file(store, label_key(task, fp[task], cell), [ROW]))

    own = [cell for cell in cells if cell.partition(".")[0] in shards]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        times_of = [max(times[cell] for times in by_cell) for cell in own]
        return list(zip(times_of, pool.map(rows_of, own), strict=True))


def label_times(store: Store, task: str, fp: str) -> dict[str, float]:
    """When each label file of the task was created, by key."""
    return {item.key: item.modified_s for item in store.list(label_folders(task, fp)[0])}
