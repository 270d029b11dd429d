"""The Ray graph: work items -> read -> label -> commit -> one row of counts a shard.

Entry point: `label_items`; `build` is the recipe. Imports torch inside the actors only, because the
driver has no need of it.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.data
from ray.exceptions import RayActorError, RayTaskError

from pipeline.errors import AssayError, LoadError, ModelError, SpecError, WorkerError
from pipeline.ledger.attempts import Attempts, attempt_name
from pipeline.ledger.blocks import (
    LabelledShard,
    ShardCounts,
    work_items_of,
    work_rows,
)
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.failed_rows import counts_of
from pipeline.ledger.keys import documents_key
from pipeline.ledger.label_files import commit_shard
from pipeline.runtime.imports import UNUSED, quick_imports, wait_passively
from pipeline.runtime.job import Job
from pipeline.runtime.left_out import end_worker, left_out, where_able
from pipeline.runtime.progress import (
    COMMITTING,
    READING,
    WAITING,
    Post,
    Send,
    WorkerReport,
    sender,
    work_report,
)
from pipeline.runtime.reading import commit_documents, output_of

# Ray fuses stages that ask for the same resources; with an engine's GPUs, these differ.
READ_CPUS = 0.25
COMMIT_CPUS = 0.125
# Longer plans run in windows, because Ray keeps an entry for every block of a running graph: 10 KB
# a shard in the driver, 4 KB in its GCS. A window loads the models again, so it has many shards for
# each engine: of a minute each, nearly an hour.
WINDOW_SHARDS, WINDOW_SHARDS_PER_ENGINE = 10_000, 50
# Engines that may die in a row while they start; more engines may, because all start at once.
START_DEATHS = 3
# Shards that Ray Data gives to an engine before it has labelled them.
WAITING_SHARDS = 2
# Every stage takes and gives whole blocks.
_WHOLE_BLOCKS: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow"}

# Work items -> a row of counts for each.
Graph = Callable[[Sequence[WorkItem], Job, Post | None], ray.data.Dataset]


def label_items(
    work_items: Sequence[WorkItem], job: Job, post: Post | None = None
) -> Iterator[ShardCounts]:
    """Labels and commits every work item; counts come as shards are committed, or have failed.

    The error of one shard is in its counts, and the others go on. The workers report to the post.
    """
    return _counts(build, work_items, job, post)


def read_items(
    work_items: Sequence[WorkItem], job: Job, post: Post | None = None
) -> Iterator[ShardCounts]:
    """Commits the documents files of these shards; their counts, or why one could not be read.

    A shard that is begun after the job's end is not read.
    """
    return _counts(build_reading, work_items, job, post)


def _counts(
    graph: Graph, work_items: Sequence[WorkItem], job: Job, post: Post | None
) -> Iterator[ShardCounts]:
    """The rows that the graph gives; the errors of its workers are ours where they can be."""
    for window in _windows(work_items, job):
        if job.is_over:
            return
        try:
            for row in graph(window, job, post).iter_rows():
                counts = ShardCounts.from_row(row)
                if counts.unable:
                    without, is_all = left_out(post)
                    if is_all:
                        raise next(reversed(without.values()), ModelError(str(counts.error)))
                    return  # the next round starts on the other nodes
                yield counts
        except RayTaskError as error:
            raise _cause(error) from error
        except RayActorError as error:
            *_, last = str(error).strip().splitlines()
            raise ModelError(
                f"the workers keep ending while they start; the last one: {last.strip()}; check "
                f"the memory and the installation of the machines, then run again"
            ) from error


def _windows(work_items: Sequence[WorkItem], job: Job) -> Iterator[Sequence[WorkItem]]:
    """The work items in the parts that one graph has."""
    size = max(WINDOW_SHARDS, WINDOW_SHARDS_PER_ENGINE * job.placement.actors)
    return (work_items[start : start + size] for start in range(0, len(work_items), size))


def build_reading(
    work_items: Sequence[WorkItem], job: Job, post: Post | None = None
) -> ray.data.Dataset:
    """The graph that reads shards and commits their documents files."""
    read = partial(read_block, job=job, post=post)
    where = where_able(job, post)
    return _work(work_items, job).map_batches(read, num_cpus=1, **where, **_WHOLE_BLOCKS)


def build(work_items: Sequence[WorkItem], job: Job, post: Post | None = None) -> ray.data.Dataset:
    """The graph. One block is one shard from the first stage to the last.

    On GPUs, reading and committing overlap with labelling, in processes of their own. On CPUs one
    process does all three: each process takes memory and the time to start.
    """
    work = _work(work_items, job)
    asks = any(item.asked_rows for item in work_items)
    placement = job.placement
    # — actors that have work are requested together: by itself a pool grows one by one
    initial_size = min(placement.actors, len(work_items))
    engines = ray.data.ActorPoolStrategy(
        min_size=1, max_size=placement.actors, initial_size=initial_size
    )
    loading = None if post is None else replace(post, engines=initial_size)
    where = where_able(job, post)
    if not placement.gpus:
        return work.map_batches(
            ShardStage,
            fn_constructor_args=(job, asks, loading),
            compute=engines,
            num_cpus=placement.threads,
            **where,
            **_WHOLE_BLOCKS,
        )
    read = work.map_batches(
        ReadStage,
        fn_constructor_args=(job, post),
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=placement.actors),
        num_cpus=READ_CPUS,
        **where,
        **_WHOLE_BLOCKS,
    )
    # — `map_batches` refuses whole blocks on GPUs; Ray's own `map_groups` calls this
    labelled = read.map_batches_internal(
        LabelStage,
        fn_constructor_args=(job, asks, loading),
        compute=engines,
        num_gpus=placement.gpus,
        **where,
        **_WHOLE_BLOCKS,
    )
    commit = partial(commit_block, job=job, post=post)
    return labelled.map_batches(commit, num_cpus=COMMIT_CPUS, **where, **_WHOLE_BLOCKS)


class Stage:
    """Builds a worker in its actor, and calls it from one thread of its own.

    Ray Data builds a stage on one thread and calls it on another. OpenMP keeps a pool of threads
    for each thread that ever used it. With more threads than cores they sleep between loops
    instead of spinning: on two cores that cost a fifth of the documents a second.

    An error of the constructor is met by the first call: Ray reports an error in an actor's
    constructor as the death of the actor, without its class.
    """

    def __init__(
        self, worker: Callable[..., Callable[[pa.Table], Iterable[pa.Table]]], post: Post | None
    ) -> None:
        self._post, self._send = post, sender(post)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage")
        self._worker = self._thread.submit(worker, send=self._send)
        if (error := self._worker.exception()) is None:
            self._send(WorkerReport(WAITING))
        else:  # — at once: the other stage of this process may wait for work
            self._send(None, cause=LoadError(error).reason)

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        try:
            if (error := self._worker.exception()) is not None:
                raise LoadError(error)
            called = self._thread.submit(surviving, block, self._worker.result(), self._send)
            made = called.result()
        except WorkerError as error:
            if self._post is None:
                raise (error.reason if isinstance(error, LoadError) else error) from error
            end_worker(error, self._post, self._send)
            made = [ShardCounts.of_failed(block, error, unable=True).to_table()]
        yield from made


class ReadStage(Stage):
    """Reads. Ray shows the names of these classes."""

    def __init__(self, job: Job, post: Post | None = None) -> None:
        super().__init__(
            lambda send: _worker_module().ReadShards(_on_this_clock(job, post), send=send), post
        )


class LabelStage(Stage):
    """Labels."""

    def __init__(self, job: Job, asks: bool, post: Post | None = None) -> None:
        def label(send: Send) -> Any:
            worker = _worker_module().LabelDocuments
            return worker(_on_this_clock(job, post), asks=asks, send=send)

        super().__init__(label, post)


class ShardStage:
    """Reads, labels and commits shards in one actor."""

    def __init__(self, job: Job, asks: bool, post: Post | None = None) -> None:
        self._job, self._post = job, post
        # — of the pool in which a tokenizer encodes several texts
        os.environ.setdefault("RAYON_NUM_THREADS", str(job.placement.threads))
        # — first, because it reports that it fetches or converts the model
        self._label = LabelStage(job, asks, post)
        self._read = ReadStage(job, post)

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        for read in self._read(block):
            for labelled in self._label(read):
                yield commit_block(labelled, self._job, self._post)


def surviving(
    block: pa.Table, stage: Callable[[pa.Table], Iterable[pa.Table]], send: Send
) -> list[pa.Table]:
    """What the stage makes of a shard; a row of counts with the error of its store or its input.

    Another error outside of `Attempts` also fails the shard. WorkerError inside of them.
    """
    if ShardCounts.are_in(block):
        return [block]
    try:
        return list(stage(block))
    except WorkerError:
        raise
    except Exception as error:
        return [ShardCounts.of_failed(block, error).to_table()]
    finally:
        send(WorkerReport(WAITING))


def _on_this_clock(job: Job, post: Post | None) -> Job:
    """The job with its end by this machine's clock, which may differ from the driver's."""
    if post is None or job.ends is None:
        return job
    return replace(job, ends=post.on_this_clock(job.ends))


def _worker_module() -> Any:
    """The module `worker`, which imports torch and transformers."""
    wait_passively(os.environ)
    with quick_imports(*UNUSED):
        from pipeline.runtime import worker
    gc.freeze()  # — the modules stay: to look at each object takes a third of a second
    atexit.register(gc.unfreeze)  # — DuckDB complains of objects that are left at the end
    return worker


def read_block(block: pa.Table, job: Job, post: Post | None = None) -> pa.Table:
    """Commits the documents file of a shard and gives its counts."""
    send = sender(post)
    (work,) = work_items_of(block)

    def read(_block: pa.Table) -> Iterator[pa.Table]:
        send(work_report(READING, work))
        if _on_this_clock(job, post).is_over:
            yield ShardCounts(work.shard.id, 0, {}, {}, {}).to_table()
        else:
            yield commit_documents(job, work).to_table()

    (counts,) = surviving(block, read, send)
    return counts


def commit_block(block: pa.Table, job: Job, post: Post | None = None) -> pa.Table:
    """Commits one labelled shard and gives its counts, or those of a shard that failed."""
    send = sender(post)

    def commit(labelled: pa.Table) -> Iterator[pa.Table]:
        shard = LabelledShard.from_table(labelled)
        send(work_report(COMMITTING, shard.work))
        store, of = output_of(job), shard.work.shard
        # — the stage that read the documents has compared them with those of the documents file
        has_documents = not shard.work.documents
        made = commit_shard(
            store, of, shard.documents, shard.files, has_documents=has_documents, since=job.since
        )
        if shard.work.tasks:
            Attempts(store, attempt_name(job.fp, shard.work), job.run_id).forget()
        status = {
            file.key: (pc.struct_field(file.rows, "status").drop_null(), file.metadata)
            for file in shard.files
            if file.cell == of.cell
        }
        status[documents_key(of.id)] = shard.documents["status"], {}
        files = {
            key: counts_of(*status[key], hash, job.since)
            for key, hash in made.items()
            if key in status
        }
        yield replace(shard.counts, created=len(made), files=files).to_table()

    (counts,) = surviving(block, commit, send)
    return counts


def _cause(error: RayTaskError) -> BaseException:
    """The error that the worker raised, where it is one of ours; Ray's own otherwise."""
    cause: Any = error.cause
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    if not isinstance(cause, AssayError) or isinstance(cause, SpecError):
        return cause if isinstance(cause, AssayError) else error
    # — Ray Data appends its own advice on retries to the message of whatever it passes on
    return type(cause)(str(cause).partition("\n")[0])


def _work(work_items: Sequence[WorkItem], job: Job) -> ray.data.Dataset:
    """A block for each work item, with Ray Data's settings for that, and for a quiet terminal."""
    context = ray.data.DataContext.get_current()
    # — a shard, a model or a machine may take hours to come; the watch looks for signs of life
    context.execution_no_progress_timeout_s = -1
    context.max_consecutive_actor_init_deaths = max(START_DEATHS, job.placement.actors)
    # — an engine that cannot load takes the shards along that wait for it
    context.max_errored_blocks = WAITING_SHARDS * job.placement.actors
    context.target_max_block_size = None
    # — wrapped in Ray's own exception, a worker's error would lose its kind on the way here
    context.raise_original_map_exception = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # — an error that ends a graph is also raised here; the caller reports it in one line
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    rows = work_rows(work_items)
    return ray.data.from_items(rows, override_num_blocks=len(rows))
