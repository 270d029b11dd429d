"""Bring an output up to date: start Ray, plan, check, label what is missing, publish.

Entry points: `run`, and `label` for the same without a snapshot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from pipeline.cache import cache_dir as default_cache_dir
from pipeline.errors import FailedRowsError, StorageError
from pipeline.ledger.attempts import in_use
from pipeline.ledger.cells import record_specs
from pipeline.ledger.failpoints import failpoint
from pipeline.options import RunOptions
from pipeline.runtime.answer_sources import has_answers, plan_reuse
from pipeline.runtime.cascades import conditions
from pipeline.runtime.classifier_files import check_classifiers
from pipeline.runtime.connection import local_ray, remote_ray
from pipeline.runtime.job import Job, Plan, list_missing, make_job, plan
from pipeline.runtime.outcome import Outcome, Tally
from pipeline.runtime.placement import (
    Machine,
    cluster,
    engine_bytes,
    place,
    spread,
    this_machine,
)
from pipeline.runtime.progress import (
    CONNECTING,
    LISTING,
    LOCATING,
    PUBLISHING,
    STARTING_RAY,
    STARTING_WORKERS,
    Progress,
    ignore,
)
from pipeline.runtime.reading import commit_documents
from pipeline.runtime.retries import with_retries
from pipeline.runtime.rounds import label_rounds
from pipeline.runtime.watch import Watch
from pipeline.sources.shards import Slice
from pipeline.spec.problems import placed_in_stage
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, check_create_only, open_store

logger = logging.getLogger(__name__)


def run(
    spec: JobSpec,
    *,
    cache_dir: Path | None = None,
    address: str | None = None,
    options: RunOptions = RunOptions(),
    announce: Callable[[Progress], None] = ignore,
) -> Outcome:
    """The outcome of a run, which labels what is missing and publishes a snapshot.

    A second run changes nothing. After an error or a crash, run again: finished shards are kept.

    Args:
        spec: The job.
        cache_dir: Folder of models and file hashes, on every node (default: `$ASSAY_CACHE`, or
            `~/.cache/assay`).
        address: A Ray cluster, such as `auto` (default: a local Ray).
        options: What is labelled and published, and when the run ends. Only a run in the main
            thread can be ended by its stall limit.
        announce: Takes the progress at each change, and once a second.

    Returns:
        Counts of rows and shards, and the number of the snapshot.

    Raises:
        SpecError: The spec names missing files, or does not fit the cluster or the model.
        RefusedError: The store could lose results, or no cluster answers at `address`.
        StorageError: A store failed, not for single shards alone; UnavailableError if it may
            succeed later.
        ModelError: The model cannot be loaded, or is not supported exactly.
        FailedRowsError: The share of failed rows exceeds `max_error_rate`.
        StalledError: No worker can go on, or a process of Ray ended.

    Examples:
        >>> run(load_spec("my.yaml")).complete
        True
    """
    cache = cache_dir or default_cache_dir()
    with label(
        spec, cache_dir=cache, address=address, options=options, announce=announce
    ) as labelled:
        if labelled.complete or options.publish_partial:
            announce(Progress(PUBLISHING))
        outcome = labelled.published(partial=options.publish_partial)
    if outcome.stopped:
        logger.warning("ended by %s; %s", outcome.stopped, outcome.left)
    return outcome


@contextmanager
def label(
    spec: JobSpec,
    *,
    cache_dir: Path,
    address: str | None = None,
    options: RunOptions = RunOptions(),
    announce: Callable[[Progress], None],
) -> Iterator[Outcome]:
    """Label every missing cell, as `run` does, and publish nothing unless an error ends it.

    Until the block ends, `assay gc` deletes nothing that the labelled output needs.
    """
    store = open_store(spec.output, spec.storage_options)
    check_create_only(store)
    with in_use(store):
        yield _labelled(spec, store, cache_dir, address, options, announce)


def _labelled(
    spec: JobSpec,
    store: Store,
    cache_dir: Path,
    address: str | None,
    options: RunOptions,
    announce: Callable[[Progress], None],
) -> Outcome:
    started, began = time.monotonic(), time.time()
    part = Slice.parse(options.sample, options.where)
    failpoint("probed")
    with Watch(announce, stall_limit_s=options.stall_limit) as watch:
        if address is not None:
            watch.enter(CONNECTING)
        with remote_ray(address) as nodes:
            watch.enter(LOCATING)
            machine = cluster(nodes) if nodes else this_machine()
            one_a_machine = place(spec.model, machine)
            seconds, bound = options.bound(_most_workers(spec, machine)) or (None, None)
            job = make_job(spec, one_a_machine, cache_dir)
            job = replace(job, ends=None if seconds is None else began + seconds)
            conditions(spec)
            for each in job.with_stages:
                with placed_in_stage(spec, each.spec, each.stage):
                    check_classifiers(each.spec, each.fp, store, cache_dir)
            watch.enter(LISTING)
            last = plan(job, store, part=part)
            for reason in last.cuts.unreadable:
                logger.warning("left out: %s", reason)
            limit, last_stage = spec.max_error_rate, _last_stage(spec)
            counts = Tally(input_rows=last.rows, max_error_rate=limit, last_stage=last_stage)
            last = _reusing_if_small(job, store, last, counts)
            if options.retry_failed:
                last = with_retries(job, store, last)
            failpoint("planned")
            job = _spread(job, machine, len(last.work_items))
            watch.enter(STARTING_RAY if last.work_items else LISTING, last)
            if last.work_items:
                with local_ray([each.placement for each in job.with_stages]):
                    last = _label_missing(job, store, last, counts, watch, options)
    slice_rows = _slice_rows(store, last, counts)
    if not last.work_items:
        counts.check_shards(store, spec.name, last.shards, last.done, slice_rows)
    failpoint("labelled")
    stopped = bound if last.work_items and job.is_over else None
    return Outcome(job, store, last, counts, time.monotonic() - started, slice_rows, stopped)


def _most_workers(spec: JobSpec, machine: Machine) -> int:
    """The workers of the model of the spec, or of a stage if that has more."""
    counts = [place(spec.model, machine).workers]
    for number, of_stage in enumerate(spec.stage_specs()):
        for own in of_stage:
            with placed_in_stage(spec, own, number):
                counts.append(place(own.model, machine).workers)
    return max(counts)


def _last_stage(spec: JobSpec) -> int | None:
    """The number of the last stage of the spec's cascade; None unless it has exactly one."""
    stages = [len(task.cascade.stages) for task in spec.cascades if task.cascade is not None]
    return stages[0] - 1 if len(stages) == 1 else None


def _spread(job: Job, machine: Machine, work_items: int) -> Job:
    """The job with as many engines as it has work for, and its stages likewise."""

    def spread_one(each: Job) -> Job:
        with placed_in_stage(job.spec, each.spec, each.stage):
            placement = replace(place(each.spec.model, machine), dtype=each.placement.dtype)
            if work_items and not placement.gpus:
                needs = engine_bytes(each.spec, each.files, placement.dtype)
                placement = spread(
                    placement, each.spec.model, machine, work_items=work_items, needs=needs
                )
        return replace(each, placement=placement, ends=job.ends)

    return replace(spread_one(job), stages=tuple(map(spread_one, job.stages)))


def _reusing_if_small(job: Job, store: Store, planned: Plan, counts: Tally) -> Plan:
    """The plan with what other shards answer, if the new texts are read faster than Ray starts."""
    if not planned.reads_little or not has_answers(job, store, planned):
        return planned
    for work in planned.unread:
        with suppress(StorageError):  # the labelling reads it again, and names it
            counts.created += commit_documents(job, [work])[0]
    return plan_reuse(job, store, planned)


def _slice_rows(store: Store, last: Plan, counts: Tally) -> dict[str, int] | None:
    return None if last.slice is None else counts.slice_rows(store, last.shards, last.done)


def _label_missing(
    job: Job, store: Store, first: Plan, counts: Tally, watch: Watch, options: RunOptions
) -> Plan:
    """Records what the fingerprints mean, and labels; the plan of the last LIST."""
    with watch.mailbox(job.spec.name, first) as mailbox:
        for each in job.with_stages:
            record_specs(store, each.fp, {n: f.json() for n, f in each.fingerprints.items()})
        failpoint("specs recorded")
        watch.enter(STARTING_WORKERS)
        try:
            return label_rounds(job, store, first, counts, watch, mailbox)
        except BaseException as error:
            if options.publish_partial and not isinstance(error, FailedRowsError):
                _publish_after_error(job, store, first, counts)
            raise


def _publish_after_error(job: Job, store: Store, first: Plan, counts: Tally) -> None:
    """Publishes the complete shards, unless too many of their rows failed."""
    listed = list_missing(job, store, first.cuts)
    try:
        slice_rows = _slice_rows(store, listed, counts)
        Outcome(job, store, listed, counts, 0.0, slice_rows).publish_part()
    except FailedRowsError as error:  # the error that ended the run is raised by the caller
        logger.warning("no partial snapshot is published: %s", error)
