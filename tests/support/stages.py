"""The stages of the graph, called one after another in this process: no Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import pyarrow as pa
import pytest

from pipeline.errors import LoadError
from pipeline.ledger.blocks import ReadShard, ShardCounts, work_rows
from pipeline.ledger.cells import WorkItem
from pipeline.runtime.connection import remote_ray
from pipeline.runtime.graph import commit_block, read_block, surviving
from pipeline.runtime.job import Job
from pipeline.runtime.placement import Resources
from pipeline.runtime.progress import ignore
from pipeline.runtime.worker import LabelDocuments, ReadShards


def read(job: Job, work_items: Sequence[WorkItem]) -> Iterator[list[ReadShard]]:
    """The blocks that the first stage makes of each work item."""
    stage, rows = _reading(job, work_items)
    for row in rows:
        yield [ReadShard.from_table(block) for block in stage(row)]


def _reading(job: Job, work_items: Sequence[WorkItem]) -> tuple[ReadShards, list[pa.Table]]:
    return ReadShards(job), [pa.Table.from_pylist([row]) for row in work_rows(work_items)]


def label_and_commit(
    work_items: Sequence[WorkItem],
    job: Job,
    _mailbox: None = None,
    label: LabelDocuments | None = None,
) -> Iterator[ShardCounts]:
    """What `graph.label_items` does; the error of a worker that would end is raised."""
    worker = label or LabelDocuments(job, asks=any(work.asked_rows for work in work_items))
    stage, rows = _reading(job, work_items)
    for block in rows:
        for shard in surviving(block, stage, ignore):
            try:
                of_shard = surviving(shard, worker, ignore)
            except LoadError as error:
                raise error.reason from error
            for labelled in of_shard:
                (row,) = commit_block(labelled, job).to_pylist()
                yield ShardCounts.from_row(row)


def read_and_commit(
    work_items: Sequence[WorkItem], job: Job, _post: None = None
) -> Iterator[ShardCounts]:
    """What `graph.read_items` does."""
    for work in work_items:
        (row,) = read_block(pa.Table.from_pylist(work_rows([work])), job).to_pylist()
        yield ShardCounts.from_row(row)


def _this_machine_or(
    address: str | None, *, insecure: bool
) -> AbstractContextManager[list[Resources]]:
    return nullcontext([]) if address is None else remote_ray(address, insecure=insecure)


def run_without_ray(patch: pytest.MonkeyPatch) -> None:
    """From now on, `run` calls the stages in this process, with the spec's own model.

    It plans for this machine, also where other tests of this process are connected to a Ray.
    """
    patch.setattr("pipeline.runtime.run.remote_ray", _this_machine_or)
    patch.setattr("pipeline.runtime.graph.label_items", label_and_commit)
    patch.setattr("pipeline.runtime.graph.read_items", read_and_commit)
    patch.setattr("pipeline.runtime.run.local_ray", lambda _placement: nullcontext())
