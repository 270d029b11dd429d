"""The graph's functions, called one after another in this process: no Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.errors import LoadError, WorkerError
from pipeline.ledger.attempts import Attempts, attempt_name
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.counts import ShardCounts
from pipeline.runtime.job import Job
from pipeline.runtime.readers import LoadedReader
from pipeline.runtime.reading import ReadShard, commit_documents, read_shard
from pipeline.runtime.session import remote_ray
from pipeline.runtime.worker import label_shard, load_readers
from pipeline.sources.shards import Shard
from pipeline.sources.source import read_documents
from pipeline.sources.streams import Options
from pipeline.stores.store import open_store


def read(job: Job, work_items: Sequence[WorkItem]) -> Iterator[ReadShard]:
    """The shard of each work item."""
    store = open_store(job.spec.output, job.spec.storage_options)
    for work in work_items:
        yield read_shard(job, store, work, Attempts(store, attempt_name(job.fp, work), job.run.id))


def label_and_commit(
    work_items: Sequence[WorkItem],
    job: Job,
    *_: object,
    readers: Sequence[LoadedReader] | None = None,
) -> Iterator[ShardCounts]:
    """What `graph.label_items` does; the error of a worker that would end is raised."""
    store = open_store(job.spec.output, job.spec.storage_options)
    readers = readers or load_readers(job, asks=any(work.asked_rows for work in work_items))
    for work in work_items:
        if job.run.is_over:
            return
        try:
            yield label_shard(job, readers, store, work)
        except LoadError as error:
            raise error.reason from error
        except WorkerError:
            raise
        except Exception as error:
            yield ShardCounts.of_failed(work, error)


def read_and_commit(work_items: Sequence[WorkItem], job: Job, *_: object) -> Iterator[ShardCounts]:
    """What `graph.read_items` does."""
    for work in work_items:
        try:
            yield commit_documents(job, work)
        except Exception as error:
            yield ShardCounts.of_failed(work, error)


def fail_reads(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[str, int], Exception | None]
) -> Counter[str]:
    """Reading raises what `error` gives for the name of a file and the number of the try."""
    tries: Counter[str] = Counter()

    def read(shard: Shard, options: Options) -> Iterator[pa.Table]:
        name = Path(shard.path).stem
        tries[name] += 1
        if (raised := error(name, tries[name])) is not None:
            raise raised
        return read_documents(shard, options)

    monkeypatch.setattr("pipeline.runtime.reading.read_documents", read)
    return tries


def _this_machine_or(address: str | None, *, insecure: bool) -> AbstractContextManager[bool]:
    return nullcontext(False) if address is None else remote_ray(address, insecure=insecure)


def run_without_ray(patch: pytest.MonkeyPatch) -> None:
    """From now on, `run` calls the graph's functions here, with the spec's own model.

    It plans for this machine, also where other tests of this process are connected to a Ray.
    """
    patch.setattr("pipeline.runtime.run.remote_ray", _this_machine_or)
    patch.setattr("pipeline.runtime.graph.label_items", label_and_commit)
    patch.setattr("pipeline.runtime.graph.read_items", read_and_commit)
    patch.setattr("pipeline.runtime.run.local_ray", lambda _placement: nullcontext())
