"""What a run has to do: the shards of the input, and the cells that are missing.

Entry points: `plan`, and `list_missing` to plan again. Opens no document. Must import neither torch
nor Ray.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow.compute as pc

from pipeline.errors import Problem, SpecError
from pipeline.ledger.cells import Committed, WorkItem, committed, remaining, unfinished
from pipeline.ledger.cuts import Cut, Cuts, load_or_cut
from pipeline.ledger.snapshots import counted_files
from pipeline.runtime.conditions import WHERE, check, drawn_from
from pipeline.runtime.job import Job
from pipeline.runtime.placement import SERVER_SHARD_BYTES, shard_bytes
from pipeline.sources.shards import MAX_SHARD_BYTES, Shard
from pipeline.sources.source import InputObject, find_objects
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, open_store

# Read by one process before Ray has started.
SMALL_INPUT_BYTES = 16 * 1024 * 1024
SMALL_INPUT_SHARDS = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """All shards of the input, and what a LIST of the output shows of them."""

    cuts: Cuts
    done: Committed
    work_items: tuple[WorkItem, ...]
    distinct: int | None = None  # texts of the shards with work; None: not known
    limit: str | None = None  # the condition of the run
    # Documents that it accepts, by shard id, where a dry run knows them.
    inside: Mapping[str, int] = field(default_factory=dict)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.cuts.shards

    @property
    def rows(self) -> int:
        """The rows of the whole input."""
        return sum(shard.rows for shard in self.shards)

    @property
    def missing_shards(self) -> int:
        """The number of shards with work; one may have a work item for retries, too."""
        return len({work.shard.id for work in self.work_items})

    @property
    def missing_rows(self) -> int:
        """The rows of the shards that have work; of those accepted, where they are known."""
        return sum({work.shard.id: self.rows_of(work) for work in self.work_items}.values())

    def rows_of(self, work: WorkItem) -> int:
        """The rows of an item's shard; of those the accepted ones, where they are known."""
        return self.inside.get(work.shard.id, work.shard.rows)

    @property
    def rows_for_model(self) -> int:
        """The most documents that the model reads: of equal texts one, and none that is known."""
        asked: dict[str, int] = {}
        for work in self.work_items:
            rows = min(work.asked_rows, self.rows_of(work))
            asked[work.shard.id] = max(asked.get(work.shard.id, 0), rows)
        return sum(asked.values())

    @property
    def reuses(self) -> bool:
        """Whether some documents are answered by what is known of equal texts."""
        return any(work.sources or work.rows_without_answer is not None for work in self.work_items)


def plan(
    job: Job,
    store: Store,
    *,
    retry_failed: bool = False,
    keep: bool = True,
    by_nodes: Cut | None = None,
) -> Plan:
    """The job's shards and their missing cells; new input files are cut into shards here.

    With `retry_failed`, the work also has the finished shards with readable rows that failed. With
    `keep` the cut is stored for every later run. Only a run that labels stores it, because the size
    of the shards depends on its machine. `by_nodes` is that of `load_or_cut`.
    """
    source = job.spec.input
    objects = _objects(job.spec, store, Path(job.cache_dir))
    largest = max(reader.files.size_bytes for reader in job.readers)
    usual = shard_bytes(job.placement.device, largest)
    if job.spec.model.engine == "openai":
        usual = SERVER_SHARD_BYTES
    target = usual if source.shard_bytes == "auto" else source.shard_bytes
    cuts = load_or_cut(store, objects, source.columns, target, keep=keep, by_nodes=by_nodes)
    shards, of_input = cuts.shards, source.storage_options
    for number, task in enumerate(job.spec.tasks):
        if task.when is not None:
            before = job.spec.tasks[:number]
            check(task.when, shards, of_input, place=f"tasks.{number}.when", before=before)
    if job.run.limit is not None:
        check(job.run.limit, shards, of_input, place=WHERE)
        cuts = replace(cuts, shards=drawn_from(job.run.limit, shards))
    planned = list_missing(job, store, cuts)
    if not retry_failed:
        return planned
    return _planned(job, cuts, planned.done, retries(job, store, planned))


def list_missing(job: Job, store: Store, cuts: Cuts, before: Sequence[WorkItem] = ()) -> Plan:
    """The plan for these shards, from a LIST of the output.

    Of the work items `before`, those that try failed rows again are in it until they are done.
    """
    done = committed(store, job.fp, frozenset(shard.id for shard in cuts.shards))
    return _planned(job, cuts, done, unfinished(before, done))


def _planned(job: Job, cuts: Cuts, done: Committed, tried_again: Sequence[WorkItem]) -> Plan:
    """The plan of what is missing and is not made by the work items that try rows again."""
    made = {item.shard.id: item.tasks for item in tried_again}
    items = []
    for item in remaining(cuts.shards, list(job.fp), done):
        tasks = tuple(task for task in item.tasks if task not in made.get(item.shard.id, ()))
        if tasks or item.documents:
            items.append(replace(item, tasks=tasks))
    with_known = tuple(_with_known(job, item, done) for item in (*items, *tried_again))
    return Plan(cuts, done, with_known, limit=job.run.limit)


def _with_known(job: Job, item: WorkItem, done: Committed) -> WorkItem:
    """The work item with the files of the other tasks that its conditions name.

    The model reads nothing if classifiers answer its tasks.
    """
    if not any(step.by_model for step in job.steps if step.task in item.tasks):
        item = replace(item, rows_without_answer=0)
    needed = {name for task in item.tasks for name in job.named_by(task)} - {*item.tasks}
    known = {name: done.label_key(name, item.shard.id) for name in needed}
    return replace(item, known=known) if known else item


def retries(job: Job, store: Store, planned: Plan) -> list[WorkItem]:
    """A work item for each finished shard with readable rows that failed.

    No task is asked again about a row that it answered. No file is read whose counts are known. A
    task whose condition names one that is tried again is in the same work item, also where it was
    never asked: which rows it is asked about follows from the answers of the other.
    """
    done = planned.done
    files = counted_files(store, job.spec.name, planned.shards, done)
    failed = defaultdict[str, set[str]](set)  # the tasks by shard
    for file in files.filter(pc.greater(files["to_retry"], 0)).select(["sid", "task"]).to_pylist():
        failed[file["sid"]].add(file["task"])
    items = []
    for shard in planned.shards:
        sid, retried = shard.id, list[str]()
        if sid in failed and sid in done.documents:
            for task in done.fp:
                if task in failed[sid] or not {*retried}.isdisjoint(job.named_by(task)):
                    retried.append(task)
            number = max(done.retry(task, sid) for task in retried) + 1
            items.append(WorkItem(shard, tuple(retried), documents=False, retry=number))
    return items


def reads_little(shards: Collection[Shard]) -> bool:
    """Whether one process reads these shards faster than Ray starts."""
    text_bytes = sum(shard.piece.text_bytes for shard in shards)
    return len(shards) <= SMALL_INPUT_SHARDS and text_bytes <= SMALL_INPUT_BYTES


def check_places(spec: JobSpec, cache_dir: Path) -> None:
    """The checks of output and input that need no model; SpecError or RefusedError.

    The rows and columns of a large input are checked later, because they take a while to count.
    """
    store, source = open_store(spec.output, spec.storage_options), spec.input
    objects = _objects(spec, store, cache_dir)
    if sum(item.size_bytes for item in objects) <= SMALL_INPUT_BYTES:
        load_or_cut(store, objects, source.columns, MAX_SHARD_BYTES, keep=False)


def _objects(spec: JobSpec, store: Store, cache_dir: Path) -> list[InputObject]:
    """The input's files; SpecError if there are none, or if the path is in the output."""
    source, url = spec.input, store.url
    objects = find_objects(source.path, cache_dir, source.storage_options, output=url)
    # — a local path may lead into the output by a link
    real: Callable[[str], str] = str if "://" in url else os.path.realpath
    inside = [item.path for item in objects if real(item.path).startswith(f"{real(url)}/")]
    if inside:  # a run would label its own results
        fix = f"{len(inside)} of its files are in the output {store.url}; name another output"
        raise SpecError([Problem("input.path", fix, inside[0])])
    return objects
