"""The Ray graph: a row for each work item -> `label_shard` in an actor -> a row with its counts.

Entry points: `label_items` and `read_items`; `build` is the recipe. Imports torch inside the actors
only, because the driver has no need of it.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar

import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayActorError, RayError, RayTaskError

from pipeline.errors import (
    AssayError,
    LoadError,
    ModelError,
    SpecError,
    UnavailableError,
    WorkerError,
)
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.counts import ShardCounts
from pipeline.runtime.imports import UNUSED, quick_imports, wait_passively
from pipeline.runtime.job import Job
from pipeline.runtime.left_out import end_worker, left_out, where_able
from pipeline.runtime.mailbox import Post, sender
from pipeline.runtime.progress import READING, WAITING, WorkerReport, ignore, work_report
from pipeline.runtime.reading import commit_documents, output_of

# Longer plans run in windows, because Ray keeps an entry for every block of a running graph: 10 KB
# a shard in the driver, 4 KB in its GCS. A window loads the models again, so it has many shards for
# each engine: of a minute each, nearly an hour.
WINDOW_SHARDS, WINDOW_SHARDS_PER_ENGINE = 10_000, 50
# Engines that may die in a row while they start; more engines may, because all start at once.
START_DEATHS = 3
# Shards that Ray Data gives to an engine for each that is at work there.
WAITING_SHARDS = 2
# The columns of the graph's rows, with pickled values.
WORK, COUNTS = "work", "counts"
Result = TypeVar("Result")
_ONE_ROW: dict[str, Any] = {"batch_size": 1, "batch_format": "pyarrow"}


def run_graph(
    graph: Callable[[Sequence[WorkItem], Job, Post | None], ray.data.Dataset],
    work_items: Sequence[WorkItem],
    job: Job,
    post: Post | None = None,
    check: Callable[[], None] = ignore,
) -> Iterator[ShardCounts]:
    """The counts of each work item, as its shard is committed or has failed.

    The error of one shard is in its counts, and the others go on. The workers report to the post.
    `check` is called several times a second, and ends the work by raising an error. A shard that
    is begun after the job's end is left. Where no worker can load, the error of the last one.
    """
    Checked.check = staticmethod(check)
    for window in _windows(work_items, job):
        if job.run.is_over:
            return
        answered = False
        with _errors_of_ray():
            try:
                for row in graph(window, job, post).iter_rows():
                    yield pickle.loads(row[COUNTS])
                    answered = True
            except RayActorError:  # — Ray Data gives up after too many deaths
                if not left_out(post)[0]:
                    raise
        without, is_all = left_out(post)
        if is_all and not answered:
            raise next(reversed(without.values()))


@contextmanager
def _errors_of_ray() -> Iterator[None]:
    """Raises the error of a worker for Ray's in this block, and one of ours for Ray's own."""
    try:
        yield
    except RayTaskError as error:
        raise _cause(error) from error
    except RayActorError as error:
        raise ModelError(
            f"the workers keep ending while they start; the last one: {_last_line(error)}; check "
            f"the memory and the installation of the machines, then run again"
        ) from error
    except RayError as error:
        reason = f"Ray cannot go on: {_last_line(error)}"
        raise UnavailableError(f"{reason}; run again: finished shards are kept") from error


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()


def on_a_node(call: Callable[[], Result], **needs: Any) -> Result:
    """The result of a call, as a task of Ray on a node that has these resources and labels."""
    task: Any = ray.remote(**{"num_cpus": 0, **needs})(_called)
    with _errors_of_ray():
        result: Result = ray.get(task.remote(call))
    return result


def _called(call: Callable[[], Result]) -> Result:
    return call()


class Checked:
    """Calls `check` at each step of a graph. Ray Data sends the class to workers, by its name."""

    check: ClassVar[Callable[[], None]] = ignore

    def on_execution_step(self, _executor: object) -> None:
        Checked.check()

    # — Ray Data calls these, too
    before_execution_starts = after_execution_succeeds = after_execution_fails = ignore


def _windows(work_items: Sequence[WorkItem], job: Job) -> Iterator[Sequence[WorkItem]]:
    """The work items in the parts that one graph has."""
    size = max(WINDOW_SHARDS, WINDOW_SHARDS_PER_ENGINE * job.placement.actors)
    return (work_items[start : start + size] for start in range(0, len(work_items), size))


def build_reading(
    work_items: Sequence[WorkItem], job: Job, post: Post | None = None
) -> ray.data.Dataset:
    """The graph that reads shards and commits their documents files."""
    read = partial(_read, job=job, post=post)
    where = where_able(job, post)
    return _work(work_items, job).map_batches(read, num_cpus=1, **where, **_ONE_ROW)


def build(work_items: Sequence[WorkItem], job: Job, post: Post | None = None) -> ray.data.Dataset:
    """The graph: a row for each work item, an actor for each engine, a call for each shard."""
    asks = any(item.asked_rows for item in work_items)
    placement = job.placement
    # — actors that have work are requested together: by itself a pool grows one by one
    initial_size = min(placement.actors, len(work_items))
    engines = ray.data.ActorPoolStrategy(
        min_size=1,
        max_size=None if placement.grows else placement.actors,
        initial_size=initial_size,
        max_concurrent_calls_per_actor=shards_at_work(job),
        enable_true_multi_threading=True,
    )
    processors: dict[str, Any] = {"num_cpus": placement.threads}
    if placement.gpus:
        processors = {"num_gpus": placement.gpus}
    return _work(work_items, job).map_batches(
        ShardWorker,
        fn_constructor_args=(job, asks, post),
        compute=engines,
        **processors,
        **where_able(job, post),
        **_ONE_ROW,
    )


# `label_items` labels every work item; `read_items` commits the documents files of the shards.
label_items, read_items = partial(run_graph, build), partial(run_graph, build_reading)


def shards_at_work(job: Job) -> int:
    """How many shards an engine's process has at work at once.

    One is labelled on a GPU while the other is read, tokenised or committed. On CPUs these would
    take the processors from each other. A server's answers are kept until their shard is committed.
    """
    return 2 if job.placement.gpus and job.spec.server is None else 1


class ShardWorker:
    """Labels shards in an actor, with threads of its own. Ray shows the name of this class.

    Ray Data builds an actor on one thread and calls it on others. OpenMP keeps a pool of threads
    for each thread that ever used it. With more threads than cores they sleep between loops
    instead of spinning: on two cores that cost a fifth of the documents a second.

    An error of the constructor is raised by the first call: Ray reports an error in an actor's
    constructor as the death of the actor, without its class.
    """

    def __init__(self, job: Job, asks: bool, post: Post | None = None) -> None:
        # — of the pool in which a tokenizer encodes several texts
        os.environ.setdefault("RAYON_NUM_THREADS", str(job.placement.threads))
        self._job, self._post, self._send = job, post, sender(post)
        shards = shards_at_work(job)
        self._places = Places(shards)
        self._at_work: set[str] = set()  # ids of shards
        self._threads = ThreadPoolExecutor(shards, thread_name_prefix="shard")
        self._readers = self._threads.submit(self._load, asks)
        if self._readers.exception() is None:
            self._send(WorkerReport(WAITING))

    def _load(self, asks: bool) -> Any:
        """What answers; StorageError before it is loaded, if this is not the driver's output."""
        self._store = output_of(self._job)
        return _worker_module().load_readers(self._job, asks=asks, send=self._send)

    def __call__(self, row: pa.Table) -> pa.Table:
        work = _work_in(row)
        if self._job.run.is_over:
            return _row_of()
        try:
            if (error := self._readers.exception()) is not None:
                raise LoadError(error)
            self._at_work.add(work.shard.id)
            counts = self._threads.submit(_counted, work, partial(self._label, work)).result()
            self._at_work.discard(work.shard.id)
            if not self._at_work:
                self._send(WorkerReport(WAITING))
        except WorkerError as error:
            if self._post is None:
                raise (error.reason if isinstance(error, LoadError) else error) from error
            end_worker(error, self._post)
        return _row_of(counts)

    def _label(self, work: WorkItem) -> ShardCounts:
        label, readers = _worker_module().label_shard, self._readers.result()
        counts: ShardCounts = label(
            self._job, readers, self._store, work, send=self._send, turn=self._places.of
        )
        return counts


class Places:
    """How many shards are at work in a process at once: all places, or one alone."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = threading.Semaphore(count)
        # — without it, two that wait for all places would block each other
        self._taking = threading.Lock()

    @contextmanager
    def of(self, alone: bool) -> Iterator[None]:
        """Waits for a place, or for all of them."""
        taken = self._count if alone else 1
        with self._taking:
            for _ in range(taken):
                self._free.acquire()
        try:
            yield
        finally:
            self._free.release(taken)


def _counted(work: WorkItem, label: Callable[[], ShardCounts]) -> ShardCounts:
    """The counts of a shard, or those of one that its store or its input failed.

    WorkerError if the worker must end.
    """
    try:
        return label()
    except WorkerError:
        raise
    except Exception as error:  # — one bad shard ends no run: the driver names it, and tries again
        return ShardCounts.of_failed(work, error)


def _worker_module() -> Any:
    """The module `worker`, which imports torch and transformers."""
    if (loaded := sys.modules.get("pipeline.runtime.worker")) is not None:
        return loaded
    wait_passively(os.environ)
    with quick_imports(*UNUSED):
        from pipeline.runtime import worker
    gc.freeze()  # — modules are not freed: to scan their objects takes a third of a second
    atexit.register(gc.unfreeze)  # — DuckDB reports objects that are left at the end
    return worker


def _read(row: pa.Table, job: Job, post: Post | None = None) -> pa.Table:
    """Commits the documents file of a shard and gives its counts."""
    work, send = _work_in(row), sender(post)
    send(work_report(READING, work))
    if job.run.is_over:
        return _row_of()
    counts = _counted(work, partial(commit_documents, job, work))
    send(WorkerReport(WAITING))
    return _row_of(counts)


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
    """A row and a block for each work item; settings of Ray Data for that, and for a terminal."""
    context = ray.data.DataContext.get_current()
    # — a shard, a model or a machine may take hours to come; the watch looks for signs of life
    context.execution_no_progress_timeout_s = -1
    # — of a pool that may grow, Ray Data counts those for which no machine came
    grows, engines = job.placement.grows, job.placement.actors
    context.max_consecutive_actor_init_deaths = -1 if grows else max(START_DEATHS, engines)
    # — an engine that cannot load also fails the shards that wait for it
    context.max_errored_blocks = WAITING_SHARDS * shards_at_work(job) * engines
    context.target_max_block_size = None
    # — wrapped in Ray's own exception, a worker's error would lose its kind on the way here
    context.raise_original_map_exception = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.custom_execution_callback_classes = [Checked]  # type: ignore[list-item]
    # — an error that ends a graph is also raised here; the caller reports it in one line
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    rows = [{WORK: pickle.dumps(item)} for item in work_items]
    return ray.data.from_items(rows, override_num_blocks=len(rows))


def _work_in(row: pa.Table) -> WorkItem:
    [work] = row.column(WORK).to_pylist()
    item: WorkItem = pickle.loads(work)
    return item


def _row_of(*counts: ShardCounts) -> pa.Table:
    """The row of a shard; no row of one that was not begun."""
    return pa.table({COUNTS: pa.array(map(pickle.dumps, counts), pa.binary())})
