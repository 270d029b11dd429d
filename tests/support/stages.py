"""The stages of the graph, called one after another in this process: no Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import pyarrow as pa
import pytest

from pipeline.ledger.blocks import ShardCounts, TokenisedShard, work_rows
from pipeline.ledger.cells import WorkItem
from pipeline.runtime.graph import commit_block
from pipeline.runtime.job import Job
from pipeline.runtime.reading import commit_documents
from pipeline.runtime.worker import LabelDocuments, Tokenise


def tokenise(job: Job, work_items: Sequence[WorkItem]) -> Iterator[list[TokenisedShard]]:
    """The blocks that the first stage makes of each work item."""
    stage = Tokenise(job)
    for row in work_rows(work_items):
        blocks = stage(pa.Table.from_pylist([row]))
        yield [TokenisedShard.from_table(block) for block in blocks]


def label_and_commit(
    work_items: Sequence[WorkItem],
    job: Job,
    _mailbox: None = None,
    label: LabelDocuments | None = None,
) -> Iterator[ShardCounts]:
    """What `graph.label_items` does."""
    worker = label or LabelDocuments(job, asks=any(work.asks for work in work_items))
    for shards in tokenise(job, work_items):
        for shard in shards:
            for block in worker(shard.to_table()):
                (row,) = commit_block(block, job).to_pylist()
                yield ShardCounts.from_row(row)


def read_and_commit(work_items: Sequence[WorkItem], job: Job) -> Iterator[tuple[int, int]]:
    """What `graph.read_items` does."""
    for work in work_items:
        yield commit_documents(job, [work])


def run_without_ray(patch: pytest.MonkeyPatch) -> None:
    """From now on, `run` calls the stages in this process, with the spec's own model."""
    patch.setattr("pipeline.runtime.graph.label_items", label_and_commit)
    patch.setattr("pipeline.runtime.graph.read_items", read_and_commit)
    patch.setattr("pipeline.runtime.run.local_ray", lambda _placement: nullcontext())
