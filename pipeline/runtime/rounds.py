"""Labels what a plan lacks, lists the output again, and labels what is still missing.

Entry points: `label_rounds`, and `label_stages` for a job with cascades.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from pipeline.ledger.cells import unfinished
from pipeline.ledger.failpoints import failpoint
from pipeline.runtime.cascades import Cascades
from pipeline.runtime.job import Job, Plan, by_reader, list_missing
from pipeline.runtime.matching import matched
from pipeline.runtime.outcome import Tally, failed_rows, published_counts, retry_items
from pipeline.runtime.progress import JOINING, READING_TEXTS, STARTING_WORKERS
from pipeline.runtime.watch import Watch
from pipeline.spec.problems import placed_in_stage
from pipeline.stores.store import Store

logger = logging.getLogger(__name__)

# After the graph ends the output is listed again. What is still missing runs again, this often.
EXTRA_ROUNDS = 2


def label_rounds(
    job: Job, store: Store, first: Plan, counts: Tally, watch: Watch, mailbox: Any
) -> Plan:
    """Runs the graph, lists the output, and runs what is still missing; the plan of the last LIST.

    FailedRowsError as soon as the share of failed rows exceeds `max_error_rate`.
    """
    # — imports Ray Data: `local_ray` has begun it
    from pipeline.runtime.graph import label_items, read_items

    last = first
    for round_number in range(1 + EXTRA_ROUNDS):
        if job.is_over:
            break
        if round_number:
            logger.warning("%d shards are still missing; they run again", len(last.work_items))
        if unread := last.unread:
            watch.enter(READING_TEXTS, replace(last, work_items=unread))
            for created, rows in read_items(unread, job):
                watch.read(rows)
                counts.created += created
        if job.is_over:
            break
        last = matched(job, store, last)
        has_repeated = bool(last.repeated)
        if has_repeated:
            watch.enter(STARTING_WORKERS, replace(last, work_items=last.repeated, repeated=()))
            for shard in label_items(last.repeated, job, mailbox):
                watch.committed(shard)
                counts.add_texts(shard, job)
            failpoint("repeated texts asked")
            last = matched(job, store, _listed(job, store, first))
        if has_repeated or not round_number:
            watch.enter(STARTING_WORKERS, last)
        for shard in label_items(last.work_items, job, mailbox):
            watch.committed(shard)
            counts.add(shard, job)
        last = _listed(job, store, first)
        if not last.work_items:
            break
    return last


def _listed(job: Job, store: Store, first: Plan) -> Plan:
    """What is still missing of the first plan, from a new LIST."""
    listed = list_missing(job, store, first.cuts)
    retries = unfinished(first.work_items, listed.done)
    return replace(listed, work_items=(*listed.work_items, *retries))


def label_stages(
    job: Job,
    store: Store,
    first: Plan,
    counts: Tally,
    watch: Watch,
    mailbox: Any,
    *,
    retry: bool,
) -> Plan:
    """Labels with one stage of the cascades after the other; the plan of the last LIST.

    The other tasks are answered with the first stage.
    """
    from pipeline.runtime.graph import label_items

    last = first
    for round_number in range(1 + EXTRA_ROUNDS):
        is_retry = retry and not round_number
        ids = {work.shard.id for work in last.work_items}
        cuts = replace(last.cuts, shards=tuple(shard for shard in last.shards if shard.id in ids))
        for own in job.stages[0]:
            planned = list_missing(own, store, cuts)
            if is_retry:
                known = published_counts(store, job.spec.name, planned.done)
                again = retry_items(store, cuts.shards, planned.done, known)
                retries = by_reader(own.spec, again)
                planned = replace(planned, work_items=(*planned.work_items, *retries))
            if planned.work_items:
                with placed_in_stage(job.spec, own.spec, own.stage):
                    label_rounds(own, store, planned, counts, watch, mailbox)
        last = _listed(job, store, first)
        cascades = Cascades(job, store, last)
        for number in range(1, len(job.stages)):
            for own, items in [] if job.is_over else cascades.items(number, retry=is_retry):
                name = f"stage {number + 1} of {len(job.stages)}"
                name = "continuations" if own.continues else name
                planned = replace(last, work_items=tuple(items), repeated=(), stage=name)
                watch.enter(STARTING_WORKERS, planned)
                with placed_in_stage(job.spec, own.spec, own.stage):
                    for shard in label_items(items, own, mailbox):
                        watch.committed(shard)
                        counts.add_texts(shard, own)
                        if own.continues and (failed := failed_rows(shard)):
                            logger.warning("%d answers could not be continued", failed)
                failpoint(f"stage {number + 1} asked")
        watch.enter(JOINING, replace(last, stage="joining"))
        for shard in cascades.joined():
            watch.read(shard.rows)
            counts.add(shard, job)
        last = _listed(job, store, first)
        if not last.work_items or job.is_over:
            break
    return last
