"""The command `assay`, with the stages in its own process and an engine that answers at once.

`python toy_assay.py run SPEC --json`, or `command.start`: no Ray, no model, short waits between
retries. On a local output each shard is labelled and committed in a child process; a killed child
is started again, as Ray does, and so is one that ends with an error. Clients of object stores
cannot be forked, so on those the driver does the work itself.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
from fake_engine import FakeEngine
from fault_proxy import STUBBORN
from stages import label_and_commit, run_without_ray

from pipeline.cli import main
from pipeline.errors import AssayError, WorkerError
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.counts import ShardCounts
from pipeline.runtime.job import Job
from pipeline.stores.retries import retry

CHILDREN = multiprocessing.get_context("fork")


def in_children(work_items: Sequence[WorkItem], job: Job, *_: object) -> Iterator[ShardCounts]:
    """Labels and commits each work item in a child, until one is not killed."""
    for work in work_items:
        answer: Any = None
        while answer is None:
            receiver, sender = CHILDREN.Pipe(duplex=False)
            child = CHILDREN.Process(target=_label, args=(work, job, sender))
            child.start()
            sender.close()
            child.join()
            if child.exitcode == 0:
                answer = receiver.recv()
        if isinstance(answer, AssayError):
            raise answer
        yield from answer


def _label(work: WorkItem, job: Job, answer: Connection) -> None:
    try:
        answer.send(list(label_and_commit([work], job)))
    except WorkerError:
        os._exit(1)
    except AssayError as error:
        answer.send(error)


def label_items(work_items: Sequence[WorkItem], job: Job, *_: object) -> Iterator[ShardCounts]:
    label = label_and_commit if "://" in job.spec.output else in_children
    yield from label(work_items, job)


def main_without_ray(words: Sequence[str]) -> int:
    """`assay` with these words, in one process and with the spec's own model; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        run_without_ray(patch)
        return main(words)


def main_of_toy(words: Sequence[str]) -> int:
    """`assay` with these words, in one process and with the fake engine; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        run_without_ray(patch)
        patch.setattr("pipeline.runtime.graph.label_items", label_items)
        patch.setattr(
            "pipeline.runtime.readers.reader_engine",
            lambda job, _send, _models: FakeEngine(job.spec.tasks),
        )
        for user in ("stores.s3", "sources.streams"):
            patch.setattr(f"pipeline.{user}.retry", lambda call, *_: retry(call, STUBBORN))
        return main(words)


if __name__ == "__main__":
    sys.exit(main_of_toy(sys.argv[1:]))
