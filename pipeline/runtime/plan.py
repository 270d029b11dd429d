"""What a run has to do: the shards of the input, and the cells that are missing.

Entry points: `plan`, and `list_missing` to plan again; `stored_files` and `plan_reuse` for the
label files of the output that already answer texts of the shards with work. Opens no document. Must
import neither torch nor Ray.

Each shard reuses the answers in its own files: to a smaller sample, or, in a retry, of the
rows that did not fail. A shard that was cut since the last snapshot, of a new, edited or moved
file, also reuses those of the shards in that snapshot that have its texts. So a first run, and one
that resumes it, reads and compares no text before it labels.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path

import pyarrow.compute as pc

from pipeline.errors import Problem, SpecError
from pipeline.ledger.cells import (
    Committed,
    Source,
    WorkItem,
    committed,
    equal_versions,
    remaining,
    unfinished,
)
from pipeline.ledger.counts_log import counted, logged_counts, with_known_counts
from pipeline.ledger.cuts import Cut, Cuts, load_or_cut
from pipeline.ledger.snapshot_files import label_files_of
from pipeline.ledger.snapshots import last_shards
from pipeline.ledger.text_index import Hashes, KnownTexts, shards_with_texts
from pipeline.runtime.conditions import WHERE, check, drawn_from
from pipeline.runtime.job import Job, Step
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
    # Documents that it accepts, by shard id, where a dry run has computed them.
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


def input_folder(work_items: Sequence[WorkItem]) -> str:
    """The folder with all input files of the work, if they are on a disk; or ""."""
    paths = {work.shard.path for work in work_items}
    local = {os.path.dirname(path) for path in paths if "://" not in path}
    return os.path.commonpath(local) if local else ""


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
    files = counted(store, label_files_of(planned.shards, done))
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


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """The label files with answers to the steps of missing tasks, and the shards that need them."""

    # By version: files of it, then of others with equal raw answers; none without an answer.
    by_version: Mapping[str, tuple[Committed, ...]]
    # Shards with work that the last snapshot did not show when the missing work was listed.
    new: frozenset[str]


def stored_files(job: Job, store: Store, planned: Plan) -> StoredFiles:
    """The files of the shards with work; if some are new, also of those in the last snapshot.

    It is the spec's last snapshot, or without one the current one.
    """
    shown = last_shards(store, job.spec.name) or last_shards(store, None)
    # — the documents of a shown shard are missing if another run has published it since the listing
    new = frozenset(
        work.shard.id
        for work in planned.work_items
        if shown and not work.retry and (work.documents or work.shard.id not in shown)
    )
    asking = {work.shard.id for work in planned.work_items}.union(shown if new else ())
    missing = {task for work in planned.work_items for task in work.tasks}
    by_version = {}
    for step in (step for step in job.steps if step.task in missing):
        fps = [step.fingerprint.id, *equal_versions(store, step.task, step.fingerprint)]
        files = (committed(store, {step.task: fp}, asking, documents={}) for fp in fps)
        if with_answers := tuple(done for done in files if done.labels[step.task]):
            by_version[step.version] = with_answers
    return StoredFiles(by_version, new if by_version else frozenset())


def plan_reuse(
    job: Job,
    store: Store,
    planned: Plan,
    stored: StoredFiles,
    texts: Iterable[tuple[str, Hashes]],
    *,
    keep: bool = True,
) -> Plan:
    """The plan, whose work items name the label files with answers to their texts.

    `texts` are the hashes of the texts of new shards, where they are known: the other shards reuse
    only their own answers. With `keep`, the output may be written; not in a dry run.
    """
    files = chain.from_iterable(stored.by_version.values())
    answered = {sid for done in files for etags in done.labels.values() for sid in etags}
    others = answered - stored.new
    known = shards_with_texts(store, texts, others, keep=keep) if stored.new else {}
    left = _left_by_own_files(job, store, planned, stored)

    @cache  # — work items share their sources
    def sources_of(task: str, version: str, sid: str) -> tuple[Source, ...]:
        files = (done.source(task, sid) for done in stored.by_version.get(version, ()))
        return tuple(source for source in files if source is not None)

    def with_sources(work: WorkItem) -> WorkItem:
        sid, rows = work.shard.id, work.asked_rows
        texts = known.get(sid, KnownTexts(rows))
        sources, asked = {}, [0]
        for step in (step for step in job.steps if step.task in work.tasks):
            of_step = partial(sources_of, step.task, step.version)
            own = () if work.documents else of_step(sid)
            others = {other: of_step(other) for other in texts.sources}
            if files := (*own, *chain.from_iterable(others.values())):
                sources[step.version] = files
            if _is_asked_first(step):
                answered = sum(texts.sources[other] for other, files in others.items() if files)
                left_by_own = left.get((sid, step.version), rows)
                asked.append(min(rows, texts.texts - answered, left_by_own))
        if not sources:
            return work
        return replace(work, sources=sources, rows_without_answer=max(asked))

    return replace(planned, work_items=tuple(map(with_sources, planned.work_items)))


def _left_by_own_files(
    job: Job, store: Store, planned: Plan, stored: StoredFiles
) -> dict[tuple[str, str], int]:
    """The most rows of a shard without an answer in its own files, where their counts are known.

    By shard and version, for the questions to the first model.
    """
    left: dict[tuple[str, str], int] = {}
    counts = logged_counts(store)
    for step in filter(_is_asked_first, job.steps):
        shards = [w.shard for w in planned.work_items if step.task in w.tasks and not w.documents]
        for done in stored.by_version.get(step.version, ()):
            files = with_known_counts(label_files_of(shards, done), counts)
            rows = pc.add(files["failed"], files["skipped"])
            for sid, count in zip(files["sid"].to_pylist(), rows.to_pylist(), strict=True):
                if count is not None:
                    left[sid, step.version] = min(count, left.get((sid, step.version), count))
    return left


def _is_asked_first(step: Step) -> bool:
    """Whether the step is a question to the model of the first reader."""
    return step.reader == 0 and step.by_model


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
