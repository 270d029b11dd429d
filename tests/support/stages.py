"""The stages of the graph, called one after another in this process: no Ray."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from pipeline.ledger.blocks import ShardCounts, TokenisedShard, work_rows
from pipeline.ledger.cells import WorkItem
from pipeline.runtime.graph import commit_block
from pipeline.runtime.job import Job
from pipeline.runtime.worker import LabelDocuments, Tokenise


def tokenise(job: Job, work_items: Sequence[WorkItem]) -> list[list[TokenisedShard]]:
    """The blocks that the first stage makes of each work item."""
    rows, reuse = work_rows(work_items)
    stage = Tokenise(job, reuse)
    blocks = [list(stage(pa.Table.from_pylist([row]))) for row in rows]
    return [[TokenisedShard.from_table(block) for block in of_row] for of_row in blocks]


def label_and_commit(
    job: Job, work_items: Sequence[WorkItem], label: LabelDocuments | None = None
) -> list[ShardCounts]:
    """Labels and commits every work item; their counts, in order."""
    asks = any(work.asks for work in work_items)
    worker = label or LabelDocuments(job, asks=asks)
    counted = []
    for (shard,) in tokenise(job, work_items):
        (row,) = commit_block(worker(shard.to_table()), job).to_pylist()
        counted.append(ShardCounts.from_row(row))
    return counted
