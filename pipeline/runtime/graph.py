"""The Ray graph: work items -> tokenise -> label -> commit -> one row of counts a shard.

Entry point: `label_items`; `build` is the recipe. Imports torch inside the actors only, because the
driver has no need of it.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayTaskError

from pipeline.errors import AssayError, SpecError
from pipeline.hashes import canonical_json
from pipeline.ledger.attempts import Attempts, attempt_name
from pipeline.ledger.blocks import LabelledShard, Reuse, ShardCounts, work_items_of, work_rows
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.failed_rows import counts_of
from pipeline.ledger.label_files import TAKEN_OVER, LabelFile, commit_shard
from pipeline.ledger.label_rows import answers_table, continuations_table, with_calibrated
from pipeline.ledger.reuse import overlaid
from pipeline.runtime.calibration_files import CalibrationFile, stored_calibrations
from pipeline.runtime.imports import UNUSED, quick_imports, wait_passively
from pipeline.runtime.job import Job
from pipeline.runtime.progress import sender
from pipeline.runtime.reading import commit_documents
from pipeline.sources.documents import OUTSIDE
from pipeline.stores.store import open_store

# Ray fuses stages that ask for the same resources; with an engine's GPUs, these differ.
TOKENISE_CPUS = 0.25
COMMIT_CPUS = 0.125
# Longer plans run in windows: Ray keeps an entry for every block of a running graph.
WINDOW_SHARDS = 10_000
# Every stage takes and gives whole blocks.
_WHOLE_BLOCKS: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow"}

Result = TypeVar("Result")


def label_items(
    work_items: Sequence[WorkItem], job: Job, mailbox: Any = None
) -> Iterator[ShardCounts]:
    """Labels and commits every work item; counts come as shards are committed.

    The workers report to the mailbox, the handle of an actor `progress.Mailbox`.
    """
    for start in range(0, len(work_items), WINDOW_SHARDS):
        if job.is_over:
            return
        try:
            dataset = build(work_items[start : start + WINDOW_SHARDS], job, mailbox)
            for row in dataset.iter_rows():
                yield ShardCounts.from_row(row)
        except RayTaskError as error:
            raise _cause(error) from error


def read_items(work_items: Sequence[WorkItem], job: Job) -> Iterator[tuple[int, int]]:
    """Commits the documents files of these shards; for each shard, the new files and the rows.

    A shard that is begun after the job's end is not read.
    """
    for start in range(0, len(work_items), WINDOW_SHARDS):
        rows, _ = work_rows(work_items[start : start + WINDOW_SHARDS])
        _configure()
        try:
            dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
                partial(read_block, job=job), num_cpus=1, **_WHOLE_BLOCKS
            )
            for row in dataset.iter_rows():
                yield row["created"], row["rows"]
        except RayTaskError as error:
            raise _cause(error) from error


def build(work_items: Sequence[WorkItem], job: Job, mailbox: Any = None) -> ray.data.Dataset:
    """The graph. One block is one shard from the first stage to the last.

    On GPUs, tokenising and committing overlap with labelling, in processes of their own. On CPUs
    one process does all three: tokenising takes a five-hundredth of the time of labelling, and each
    process takes memory and the time to start.
    """
    _configure()
    rows, reuse = work_rows(work_items)
    asks = any(work.asks for work in work_items)
    placement = job.placement
    # — actors that have work are requested together: by itself a pool grows one by one
    engines = ray.data.ActorPoolStrategy(
        min_size=1, max_size=placement.actors, initial_size=min(placement.actors, len(rows))
    )
    work = ray.data.from_items(rows, override_num_blocks=len(rows))
    if not placement.gpus:
        return work.map_batches(
            ShardStage,
            fn_constructor_args=(job, reuse, asks, mailbox),
            compute=engines,
            num_cpus=placement.threads,
            **_WHOLE_BLOCKS,
        )
    tokenised = work.map_batches(
        TokeniseStage,
        fn_constructor_args=(job, reuse, mailbox),
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=placement.actors),
        num_cpus=TOKENISE_CPUS,
        **_WHOLE_BLOCKS,
    )
    # — `map_batches` refuses whole blocks on GPUs; Ray's own `map_groups` calls this
    labelled = tokenised.map_batches_internal(
        LabelStage,
        fn_constructor_args=(job, asks, mailbox),
        compute=engines,
        num_gpus=placement.gpus,
        **_WHOLE_BLOCKS,
    )
    return labelled.map_batches(
        partial(commit_block, job=job), num_cpus=COMMIT_CPUS, **_WHOLE_BLOCKS
    )


class TokeniseStage:
    """Builds `worker.Tokenise` in its actor."""

    def __init__(self, job: Job, reuse: Reuse, mailbox: Any = None) -> None:
        send = sender(mailbox)
        worker = _worker_module()
        with ThreadPoolExecutor(max_workers=1) as thread:
            self._worker = _built(thread, worker.Tokenise, job, reuse, send=send)

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        yield from self._worker.result()(block)


class LabelStage:
    """Builds `worker.LabelDocuments` in its actor, and calls it from the thread that built it.

    Ray Data builds a stage on one thread and calls it on another. OpenMP keeps a pool of threads
    for each thread that ever used it. With more threads than cores they sleep between loops
    instead of spinning: on two cores that cost a fifth of the documents a second.
    """

    def __init__(self, job: Job, asks: bool, mailbox: Any = None) -> None:
        wait_passively(os.environ)
        send = sender(mailbox)
        worker = _worker_module()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="label")
        self._worker = _built(self._thread, worker.LabelDocuments, job, asks=asks, send=send)

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        worker = self._worker.result()
        yield from self._thread.submit(lambda: list(worker(block))).result()


class ShardStage:
    """Reads, labels and commits shards in one actor."""

    def __init__(self, job: Job, reuse: Reuse, asks: bool, mailbox: Any = None) -> None:
        self._job = job
        # — first, because it reports that it fetches or converts the model
        self._label = LabelStage(job, asks, mailbox)
        self._tokenise = TokeniseStage(job, reuse, mailbox)

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        for tokenised in self._tokenise(block):
            for labelled in self._label(tokenised):
                yield commit_block(labelled, self._job)


def _worker_module() -> Any:
    """The module `worker`, which imports torch and transformers."""
    with quick_imports(*UNUSED):
        from pipeline.runtime import worker
    gc.freeze()  # — the modules stay: to look at each object takes a third of a second
    atexit.register(gc.unfreeze)  # — DuckDB complains of objects that are left at the end
    return worker


def _built(
    thread: ThreadPoolExecutor, worker: Callable[..., Result], *arguments: Any, **named: Any
) -> Future[Result]:
    """The worker, which the thread has built. Our own errors are raised when it is called.

    Ray reports an error in an actor's constructor as the death of the actor, without its class.
    """
    built = thread.submit(worker, *arguments, **named)
    if not isinstance(built.exception(), AssayError):
        built.result()
    return built


def read_block(block: pa.Table, job: Job) -> pa.Table:
    """Commits the documents files of some shards and gives the numbers of new files and rows."""
    work_items = [] if job.is_over else work_items_of(block, [()])
    created, rows = commit_documents(job, work_items)
    return pa.table({"created": [created], "rows": [rows]})


def commit_block(block: pa.Table, job: Job) -> pa.Table:
    """Commits one labelled shard and gives its counts; StorageError unless it is exactly one."""
    shard = LabelledShard.from_table(block)
    work, labelled = shard.work, shard.labelled
    store = open_store(job.spec.output, job.spec.storage_options)
    # — the label stage has measured them
    contextual = stored_calibrations(store, job.contextual, lambda _tasks: {})
    calibrations = {**job.calibrations, **contextual}
    files = [_label_file(shard, task, job, calibrations.get(task)) for task in work.tasks]
    made = commit_shard(store, work.shard, labelled.documents, files)
    if work.tasks:
        Attempts(store, attempt_name(job.fp, work), job.run_id).forget()
    status = Counter(labelled.status)
    outside = status.pop(OUTSIDE, 0)
    counts = ShardCounts(
        sid=work.shard.id,
        rows=status.total(),
        created=len(made),
        status=dict(status),
        labels={
            # — rows without an answer have no label
            file.task: dict(Counter(file.table.column("label").drop_null().to_pylist()))
            for file in files
        },
        cost=shard.cost,
        outside=0 if work.texts else outside,
        taken_over=sum(shard.taken_over.values()),
        files={file.task: counts_of(file) for file in files if file.key(work.shard) in made},
    )
    return counts.to_table()


def _label_file(
    shard: LabelledShard, task: str, job: Job, file: CalibrationFile | None
) -> LabelFile:
    of_spec = next(each for each in job.spec.tasks if each.name == task)
    metadata = job.metadata(of_spec)
    if task in job.continues:
        table = continuations_table(shard.labelled, shard.continuations[task])
        return LabelFile(task, job.fp[task], table, metadata, shard.work.retry)
    table = answers_table(shard.labelled, of_spec)
    if task in shard.known:
        table = overlaid(table, shard.known[task])
        if shard.taken_over:
            metadata[TAKEN_OVER] = canonical_json(shard.taken_over).decode()
    if file is not None:
        table = with_calibrated(table, file.calibration)
        metadata["calibration"] = canonical_json(file.calibration.to_json()).decode()
    return LabelFile(task, job.fp[task], table, metadata, shard.work.retry)


def _cause(error: RayTaskError) -> BaseException:
    """The error that the worker raised, where it is one of ours; Ray's own otherwise."""
    cause: Any = error.cause
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    if not isinstance(cause, AssayError) or isinstance(cause, SpecError):
        return cause if isinstance(cause, AssayError) else error
    # — Ray Data appends its own advice on retries to the message of whatever it passes on
    return type(cause)(str(cause).partition("\n")[0])


def _configure() -> None:
    """Ray Data's settings for one block a shard, and for a quiet terminal."""
    context = ray.data.DataContext.get_current()
    context.target_max_block_size = None
    # — wrapped in Ray's own exception, a worker's error would lose its kind on the way here
    context.raise_original_map_exception = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # — an error that ends a graph is also raised here; the caller reports it in one line
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
