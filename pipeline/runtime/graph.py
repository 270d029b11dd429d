"""The Ray graph: work items -> tokenise -> label -> commit -> one row of counts a shard.

Entry points: `check_model` and `calibrate` before the graph, `label_items` for the graph itself.
`build` is the recipe. Imports torch inside the actors only, because the driver has no need of it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayTaskError

from pipeline.errors import AssayError, SpecError
from pipeline.hashes import canonical_json, short_hash
from pipeline.ledger.attempts import Attempts, attempt_name
from pipeline.ledger.blocks import LabelledShard, Reuse, ShardCounts, work_rows
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.label_files import LabelFile, commit_shard
from pipeline.ledger.label_rows import answers_table, with_calibrated
from pipeline.ledger.reuse import overlaid
from pipeline.runtime.calibration_files import stored_calibrations
from pipeline.runtime.job import Job
from pipeline.runtime.placement import Placement
from pipeline.runtime.progress import sender
from pipeline.sources.documents import OUTSIDE
from pipeline.spec.schema import ContextualSpec
from pipeline.stores.store import Store, open_store

# Ray fuses stages that ask for the same resources; these three differ.
TOKENISE_CPUS = 0.25
COMMIT_CPUS = 0.125
# Longer plans run in windows: Ray keeps an entry for every block of a running graph.
WINDOW_SHARDS = 10_000
# Every stage takes and gives whole blocks.
_WHOLE_BLOCKS: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow"}

Result = TypeVar("Result")


def check_model(job: Job, mailbox: Any = None) -> None:
    """Runs `assembly.preflight` on a worker, and raises its error.

    A check that passed is remembered in the cache: a worker takes seconds to import torch. The
    worker reports its phases to the mailbox.
    """
    passed = Path(job.cache_dir) / "checked" / short_hash(canonical_json([job.fp, _versions()]))
    if passed.exists():
        return
    _on_worker("pipeline.runtime.assembly:preflight", job, mailbox=mailbox, num_cpus=1)
    passed.parent.mkdir(parents=True, exist_ok=True)
    passed.touch()


def calibrate(
    job: Job, store: Store, measure: Callable[..., Any] | None = None, mailbox: Any = None
) -> Job:
    """The job with its contextual calibrations, which are measured once for each output.

    `measure` is `worker.measure_contextual`; by default it runs on a worker.
    """
    if measure is None:
        function = "pipeline.runtime.worker:measure_contextual"
        resources = _label_resources(job.placement)
        measure = partial(_on_worker, function, mailbox=mailbox, **resources)
    versions = {
        task.name: job.fingerprints[task.name]
        for task in job.spec.tasks
        if isinstance(task.calibration, ContextualSpec)
    }
    stored = stored_calibrations(store, versions, partial(measure, job))
    return replace(job, calibrations={**job.calibrations, **stored})


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


def build(work_items: Sequence[WorkItem], job: Job, mailbox: Any = None) -> ray.data.Dataset:
    """The graph in four stages. One block is one shard from the first stage to the last."""
    _configure()
    rows, reuse = work_rows(work_items)
    asks = any(work.asks for work in work_items)
    actors = job.placement.actors

    work = ray.data.from_items(rows, override_num_blocks=len(rows))
    tokenised = work.map_batches(
        TokeniseStage,
        fn_constructor_args=(job, reuse, mailbox),
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=actors),
        num_cpus=TOKENISE_CPUS,
        **_WHOLE_BLOCKS,
    )
    labelled = tokenised.map_batches(
        LabelStage,
        fn_constructor_args=(job, asks, mailbox),
        # — actors that have work are requested together: by itself a pool grows one by one
        compute=ray.data.ActorPoolStrategy(
            min_size=1, max_size=actors, initial_size=min(actors, len(rows))
        ),
        **_label_resources(job.placement),
        **_WHOLE_BLOCKS,
    )
    return labelled.map_batches(
        partial(commit_block, job=job), num_cpus=COMMIT_CPUS, **_WHOLE_BLOCKS
    )


def label_cpus(threads: int) -> float:
    """The CPUs that a labelling actor asks for: those of a node without the other stages' share.

    They are more than half of a node's CPUs, so that no node gets two actors while another is idle.
    """
    return threads - TOKENISE_CPUS - COMMIT_CPUS


def _label_resources(placement: Placement) -> dict[str, Any]:
    if placement.gpus:
        return {"num_gpus": placement.gpus}
    return {"num_cpus": label_cpus(placement.threads)}


class TokeniseStage:
    """Builds `worker.Tokenise` in its actor."""

    def __init__(self, job: Job, reuse: Reuse, mailbox: Any = None) -> None:
        from pipeline.runtime.worker import Tokenise

        with ThreadPoolExecutor(max_workers=1) as thread:
            self._worker = _built(thread, Tokenise, job, reuse, send=sender(mailbox))

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        yield from self._worker.result()(block)


class LabelStage:
    """Builds `worker.LabelDocuments` in its actor, and calls it from the thread that built it.

    Ray Data builds a stage on one thread and calls it on another. OpenMP keeps a pool of threads
    for each thread that ever used it. With more threads than cores they sleep between loops
    instead of spinning: on two cores that cost a fifth of the documents a second.
    """

    def __init__(self, job: Job, asks: bool, mailbox: Any = None) -> None:
        from pipeline.runtime.worker import LabelDocuments

        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="label")
        send = sender(mailbox)
        self._worker = _built(self._thread, LabelDocuments, job, asks=asks, send=send)

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        worker = self._worker.result()
        yield from self._thread.submit(lambda: list(worker(block))).result()


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


def commit_block(block: pa.Table, job: Job) -> pa.Table:
    """Commits one labelled shard and gives its counts; StorageError unless it is exactly one."""
    shard = LabelledShard.from_table(block)
    work, labelled = shard.work, shard.labelled
    files = [_label_file(shard, task, job) for task in work.tasks]
    store = open_store(job.spec.output, job.spec.storage_options)
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
        outside=outside,
    )
    return counts.to_table()


def _label_file(shard: LabelledShard, task: str, job: Job) -> LabelFile:
    table = answers_table(shard.labelled, next(t for t in job.spec.tasks if t.name == task))
    fingerprint = job.fingerprints[task]
    quantiser = ["torchao"] * (job.spec.model.quantize != "none")
    metadata = {
        "task": task,
        "fp": fingerprint.id,
        "spec": fingerprint.json().decode(),
        "model": canonical_json(dict(job.files.hashes)).decode(),
        "versions": canonical_json(_versions(*quantiser)).decode(),
    }
    if task in shard.known:
        table = overlaid(table, shard.known[task])
    if task in job.calibrations:
        calibration = job.calibrations[task].calibration
        table = with_calibrated(table, calibration)
        metadata["calibration"] = canonical_json(calibration.to_json()).decode()
    return LabelFile(task, fingerprint.id, table, metadata, shard.work.retry)


def _versions(*others: str) -> dict[str, str]:
    versions = {name: version(name) for name in ("torch", "transformers", *others)}
    return {"assay": version("corpus-assay"), **versions}


def _on_worker(name: str, *arguments: Any, mailbox: Any, **resources: Any) -> Any:
    """The result of the named function, in a Ray task; raises our own errors as they are."""

    def call() -> Any:  # imports the function's module, and torch with it, on the worker
        return resolve_name(name)(*arguments, send=sender(mailbox))

    try:
        return ray.get(ray.remote(**resources)(call).remote())
    except RayTaskError as error:
        raise _cause(error) from error


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
