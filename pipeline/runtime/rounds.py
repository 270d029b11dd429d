"""Labels what a plan lacks, lists the output again, and labels what is still missing.

Entry point: `label_rounds`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from pipeline.ledger.cells import unfinished
from pipeline.runtime.answer_sources import has_answers, plan_reuse
from pipeline.runtime.job import Job, Plan, list_missing
from pipeline.runtime.outcome import Tally
from pipeline.runtime.progress import READING_TEXTS, STARTING_WORKERS
from pipeline.runtime.watch import Watch
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

    plan, may_reuse = first, has_answers(job, store, first)
    for round_number in range(1 + EXTRA_ROUNDS):
        if job.is_over:
            break
        if round_number:
            logger.warning("%d shards are still missing; they run again", len(plan.work_items))
        if may_reuse and (unread := plan.unread):
            watch.enter(READING_TEXTS, replace(plan, work_items=unread))
            for created, rows in read_items(unread, job, mailbox):
                watch.read(rows)
                counts.created += created
        if job.is_over:
            break
        if may_reuse:
            plan = plan_reuse(job, store, plan)
        if may_reuse or not round_number:
            watch.enter(STARTING_WORKERS, plan)
        for shard in label_items(plan.work_items, job, mailbox):
            watch.committed(shard)
            counts.add(shard, engines=job.placement.actors)
            if shard.not_continued:
                logger.warning("%d answers could not be continued", shard.not_continued)
        plan = _listed(job, store, first)
        if not plan.work_items:
            break
    return plan


def _listed(job: Job, store: Store, first: Plan) -> Plan:
    """What is still missing of the first plan, from a new LIST."""
    listed = list_missing(job, store, first.cuts)
    retries = unfinished(first.work_items, listed.done)
    return replace(listed, work_items=(*listed.work_items, *retries))
