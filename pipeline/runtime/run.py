"""Bring an output up to date: plan, start Ray, check, and label what is missing.

Entry point: `label`, whose outcome its caller publishes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from pipeline.errors import (
    AssayError,
    FailedRowsError,
    ModelError,
    Problem,
    SpecError,
    StorageError,
)
from pipeline.inference.classifiers import label_log_probs
from pipeline.ledger.attempts import in_use
from pipeline.ledger.cells import WorkItem, record_specs
from pipeline.ledger.counts import ShardCounts
from pipeline.ledger.counts_log import CountsLog
from pipeline.ledger.failpoints import failpoint
from pipeline.ledger.keys import spec_key
from pipeline.ledger.snapshots import snapshot_numbers
from pipeline.ledger.text_index import read_texts
from pipeline.options import RunOptions
from pipeline.runtime.conditions import limit_of
from pipeline.runtime.fitted_files import read_classifier
from pipeline.runtime.job import Job, Run, limited, make_job, reader_specs
from pipeline.runtime.mailbox import Post
from pipeline.runtime.outcome import Outcome, Tally
from pipeline.runtime.placement import (
    EngineBytes,
    Machine,
    Placement,
    engine_bytes,
    longest_batch_s,
    place,
    spread,
    this_machine,
)
from pipeline.runtime.plan import (
    Plan,
    input_folder,
    list_missing,
    plan,
    plan_reuse,
    reads_little,
    stored_files,
)
from pipeline.runtime.progress import (
    CONNECTING,
    LISTING,
    LOCATING,
    READING_TEXTS,
    STARTING_RAY,
    STARTING_WORKERS,
    Progress,
    ignore,
)
from pipeline.runtime.reading import commit_documents
from pipeline.runtime.session import cluster_machine, elsewhere, local_ray, remote_ray
from pipeline.runtime.watch import Watch
from pipeline.runtime.weights import model_at
from pipeline.sources.shards import Shard
from pipeline.sources.source import cut
from pipeline.spec.portable import shared_by_nodes
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, check_create_only, open_store

logger = logging.getLogger(__name__)

# After the graph ends the output is listed again. What is still missing runs again, this often.
EXTRA_ROUNDS = 2


@contextmanager
def label(
    spec: JobSpec,
    *,
    cache_dir: Path,
    address: str | None = None,
    options: RunOptions = RunOptions(),
    limit: str | None = None,
    announce: Callable[[Progress], None],
    part_of: Run | None = None,
) -> Iterator[Outcome]:
    """Labels every missing cell, and publishes nothing unless an error ends it.

    `limit` is the condition of the run, in place of that of the options. It may be `part_of` a run
    that began before: the limits on hours and cost are of all its parts.
    Until the block ends, `assay gc` deletes nothing that the labelled output needs.
    """
    spec = shared_by_nodes(spec, address)
    store = open_store(spec.output, spec.storage_options)
    check_create_only(store)
    with in_use(store) as shown:  # — the key of a mark of this run
        limit, run = limit or limit_of(options.sample, options.where), part_of or Run()
        ends = None if options.max_hours is None else run.began + options.max_hours * 3600
        part = replace(run, ends=ends, max_cost=options.max_cost)
        failpoint("probed")
        with Watch(announce) as watch:
            if address is not None:
                watch.enter(CONNECTING)
            with planning(
                spec, store, cache_dir, address, options, limit, part, watch.enter
            ) as known:
                connected, machine, job, planned = known
                for reason in planned.cuts.unreadable:
                    logger.warning("left out: %s", reason)
                failpoint("planned")
                counts = Tally(input_rows=planned.rows, max_error_rate=spec.max_error_rate)
                if planned.work_items:
                    job = _spread(job, machine, len(planned.work_items))
                    watch.enter(STARTING_RAY, planned)
                    if connected:
                        folder = input_folder(planned.work_items)
                        job = replace(job, run=replace(job.run, shown=shown, input_folder=folder))
                    with local_ray(job.placement):
                        planned = _label_missing(job, store, planned, counts, watch, options)
                else:
                    watch.enter(LISTING, planned)
        publishes = not planned.work_items or options.publish_partial
        asked = counts.count_finished(store, spec, planned, publishes=publishes)
        failpoint("labelled")
        is_over = planned.work_items and job.run.is_over
        stopped = f"--max-hours {options.max_hours:g}" if is_over else None
        seconds = time.time() - part.began
        outcome = Outcome(job, store, planned, counts, seconds, asked, stopped)
        if stopped:
            logger.warning("ended by %s; %s", stopped, outcome.left)
        yield outcome


@contextmanager
def planning(
    spec: JobSpec,
    store: Store,
    cache_dir: Path,
    address: str | None,
    options: RunOptions,
    limit: str | None,
    part: Run,
    enter: Callable[[str], None] = ignore,
) -> Iterator[tuple[bool, Machine, Job, Plan]]:
    """Whether a cluster is connected in the block, the hardware, the job of a run, and its plan.

    `enter` takes the phases. SpecError unless the models fit the machine, and the classifiers load.
    """
    with remote_ray(address, insecure=options.insecure_cluster) as connected:
        enter(LOCATING)
        machine = cluster_machine(spec.model.device) if connected else this_machine()
        for own, places in reader_specs(spec):  # before anything is fetched
            with model_at(places["model"]):
                place(own.model, machine)
        job = make_job(spec, place(spec.model, machine), cache_dir)
        since = max(snapshot_numbers(store), default=0)
        job = replace(job, run=replace(part, since=since, unable=machine.unable))
        job = limited(job, limit)
        _check_classifiers(job, store)
        enter(LISTING)
        by_nodes = partial(_cut_by_nodes, machine.unable) if connected else None
        planned = plan(job, store, retry_failed=options.retry_failed, by_nodes=by_nodes)
        yield connected, machine, job, planned


def _cut_by_nodes(unable: frozenset[str], *of_object: Any, **options: Any) -> list[Shard]:
    """`source.cut` on a node of the cluster."""
    from pipeline.runtime.graph import on_a_node  # — imports Ray Data

    return on_a_node(partial(cut, *of_object, **options), num_cpus=1, **elsewhere(unable))


def _check_classifiers(job: Job, store: Store) -> None:
    """SpecError unless each new classifier can be loaded and has the classes of its labels.

    One whose fingerprint the output has was checked before: to load a large one takes seconds.
    """
    problems = []
    for step in job.steps:
        of_task = step.asked.classifier
        if of_task is None or any(store.list(spec_key(step.task, step.fingerprint.id))):
            continue
        reader = job.readers[step.reader]
        try:
            place = reader.places[step.task]
            classifier = read_classifier(
                reader.spec, step.asked, Path(job.cache_dir), reader.classifiers[step.task], place
            )
            p = classifier.probabilities(["a text"])
            label_log_probs(p, classifier.classes, step.asked.labels)
        except ModelError as error:
            problems.append(Problem(f"{place}.classifier", str(error), of_task.path))
    if problems:
        raise SpecError(problems)


def _spread(job: Job, machine: Machine, work_items: int) -> Job:
    """The job with as many engines as fit; on a cluster their number may grow.

    An actor has all readers, so that all have one number of actors and of threads.
    """
    placed, needs, most = list[Placement](), dict[str, EngineBytes](), work_items
    for reader in job.readers:
        model = reader.spec.model
        with model_at(reader.places["model"]):
            own = replace(place(model, machine), dtype=reader.placement.dtype)
        placed.append(own)
        if own.gpus or model.engine == "openai":
            most = min(most, own.actors)
        if not own.gpus:
            one = engine_bytes(reader.spec, reader.files, own.dtype, reader.places["documents"])
            # — readers of one model share its weights
            name = model.model_dump_json()
            needs[name] = max(one, needs.get(name, one), key=attrgetter("own"))
    for number, reader in enumerate(job.readers):
        if not placed[number].gpus:
            placed[number] = spread(
                placed[number], reader.spec.model, machine, work_items=most, needs=[*needs.values()]
            )
    first, actors = max(placed, key=attrgetter("gpus")), min(own.actors for own in placed)
    threads = max(own.threads for own in placed)
    grows = machine.grows and all(r.spec.model.engine != "openai" for r in job.readers)
    readers = tuple(
        replace(reader, placement=replace(own, actors=actors, threads=threads))
        for reader, own in zip(job.readers, placed, strict=True)
    )
    placement = replace(first, actors=actors, threads=threads, grows=grows)
    return replace(job, readers=readers, placement=placement)


def _label_missing(
    job: Job, store: Store, planned: Plan, counts: Tally, watch: Watch, options: RunOptions
) -> Plan:
    """Records what the fingerprints mean, and labels; the plan of the last LIST."""
    longest_s = max(
        longest_batch_s(r.files.size_bytes, r.spec.documents.max_tokens, r.placement)
        for r in job.readers
    )
    with watch.mailbox(job, planned, longest_s) as mailbox:
        record_specs(store, job.versions)
        failpoint("specs recorded")
        watch.enter(STARTING_WORKERS)
        try:
            with CountsLog(store) as log:
                return _label_rounds(job, store, planned, counts, log, watch, mailbox)
        except BaseException as error:
            if options.publish_partial and not isinstance(error, FailedRowsError):
                _publish_after_error(job, store, planned, counts)
            raise


def _label_rounds(
    job: Job,
    store: Store,
    initial: Plan,
    counts: Tally,
    log: CountsLog,
    watch: Watch,
    mailbox: Post | None,
) -> Plan:
    """Runs the graph, lists the output, and runs what is still missing; the plan of the last LIST.

    FailedRowsError as soon as the share of failed rows exceeds `max_error_rate`.
    """
    # — imports Ray Data: `local_ray` has begun it
    from pipeline.runtime.graph import label_items

    planned = initial
    for round_number in range(1 + EXTRA_ROUNDS):
        if round_number:
            logger.warning("%d shards are still missing; they run again", len(planned.work_items))
        if not job.run.is_over:
            planned = _with_known_answers(job, store, planned, counts, log, watch, mailbox)
        if job.run.is_over:
            break
        watch.enter(STARTING_WORKERS, planned)
        for shard in label_items(planned.work_items, job, mailbox, watch.check):
            watch.committed(shard)
            log.add(shard.files)
            counts.add(shard, engines=job.placement.actors)
        planned = list_missing(job, store, initial.cuts, initial.work_items)
        if not planned.work_items or job.run.is_over:
            break
    return planned


def _with_known_answers(
    job: Job,
    store: Store,
    planned: Plan,
    counts: Tally,
    log: CountsLog,
    watch: Watch,
    mailbox: Post | None,
) -> Plan:
    """The plan, with where the output answers its texts; those of new shards are read first."""
    from pipeline.runtime.graph import read_items

    stored = stored_files(job, store, planned)
    unread = {
        work.shard.id: replace(work, tasks=())
        for work in planned.work_items
        if work.documents and work.shard.id in stored.new
    }
    were_read, items = set(), tuple(unread.values())
    if items:
        watch.enter(READING_TEXTS, replace(planned, work_items=items))
        read = _read_small if reads_little([work.shard for work in items]) else read_items
        for shard in read(items, job, mailbox, watch.check):
            watch.read(shard.n.total_of("rows"))
            log.add(shard.files)
            counts.add_read(shard, engines=job.placement.actors)
            if shard.error is None:
                were_read.add(shard.sid)
    if not stored.by_version or job.run.is_over:
        return planned
    work_items = (
        replace(work, documents=work.documents and work.shard.id not in were_read)
        for work in planned.work_items
    )
    planned = replace(planned, work_items=tuple(work_items))
    known = {w.shard.id for w in planned.work_items if not w.documents} & stored.new
    return plan_reuse(job, store, planned, stored, read_texts(store, sorted(known)))


def _read_small(work_items: Sequence[WorkItem], job: Job, *_: object) -> Iterator[ShardCounts]:
    """`read_items` in this process, which is faster for little text."""
    for work in work_items:
        with suppress(StorageError):  # the labelling reads it again, and names it
            yield commit_documents(job, work)


def _publish_after_error(job: Job, store: Store, planned: Plan, counts: Tally) -> None:
    """Publishes the complete shards, unless too many of their rows failed."""
    try:
        listed = list_missing(job, store, planned.cuts)
        asked = counts.count_finished(store, job.spec, listed, publishes=True)
        Outcome(job, store, listed, counts, 0.0, asked).published(partial=True)
    except AssayError as error:  # the error that ended the run is raised by the caller
        logger.warning("no partial snapshot is published: %s", error)
