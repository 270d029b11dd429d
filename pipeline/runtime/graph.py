"""The Ray graph: work -> read and tokenise -> label -> commit -> one row of counts a shard.

Knows Ray and the order of the stages. The workers' insides are in `actor` and `commit`, which are
imported where they run: the driver has no torch.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayTaskError

from pipeline.errors import AssayError, SpecError, StorageError
from pipeline.fitted.calibration import Calibration, calibration_from_json
from pipeline.hashes import canonical_json, short_hash
from pipeline.ledger.attempts import Attempts, attempt_name
from pipeline.ledger.cells import ReusableShard, WorkItem
from pipeline.ledger.label_files import LabelFile, answers_table, commit_shard, with_calibrated
from pipeline.ledger.reuse import overlaid
from pipeline.runtime.job import Job, work_item_from_json, work_item_to_json
from pipeline.stores.store import open_store

# Ray fuses stages that ask for the same; these three never do.
TOKENISE_CPUS = 0.25
COMMIT_CPUS = 0.125
# Plans beyond this run in windows: Ray keeps an entry for every block of a running graph.
WINDOW_SHARDS = 10_000

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """What became of one shard; rows in equal rows out."""

    sid: str
    rows: int
    asked_rows: int  # of which the model was asked; the others were known, empty or unreadable
    created: int  # objects
    status: Mapping[str, int]
    labels: Mapping[str, Mapping[str, int]]  # by task
    seconds: float
    prefix_tokens_computed: int
    question_tokens_computed: int
    tokens_saved: int


def check_ahead(job: Job) -> None:
    """Runs `actor.preflight` on a worker; raises what it raises.

    What it found good is remembered: a worker takes seconds to import what it needs.
    """
    passed = Path(job.cache_dir) / "checked" / short_hash(canonical_json([job.fp, _versions()]))
    if passed.exists():
        return
    try:
        ray.get(ray.remote(num_cpus=1)(_preflight).remote(job))
    except RayTaskError as error:
        raise _cause(error) from error
    passed.parent.mkdir(parents=True, exist_ok=True)
    passed.touch()


def label_items(work_items: Sequence[WorkItem], job: Job) -> Iterator[ShardCounts]:
    """Labels and commits every piece of work; counts come as shards are committed."""
    for start in range(0, len(work_items), WINDOW_SHARDS):
        try:
            dataset = build(work_items[start : start + WINDOW_SHARDS], job)
            for row in dataset.iter_rows():
                yield ShardCounts(**json.loads(row["counts"]))
        except RayTaskError as error:
            raise _cause(error) from error


def build(work_items: Sequence[WorkItem], job: Job) -> ray.data.Dataset:
    """The graph; one block is one shard from end to end."""
    _configure()
    placement = job.placement
    cpus = label_cpus(placement.threads)
    device = {"num_gpus": placement.gpus} if placement.gpus else {"num_cpus": cpus}
    pool = ray.data.ActorPoolStrategy(min_size=1, max_size=placement.actors)
    # — where there is work for all, all are asked for at once: a pool grows one by one
    labelling = ray.data.ActorPoolStrategy(
        min_size=1, max_size=placement.actors, initial_size=min(placement.actors, len(work_items))
    )
    # Each work names its earlier shards by their place; they travel once to each worker.
    earlier = list({id(work.reuse): work.reuse for work in work_items}.values())
    place_of = {id(each): place for place, each in enumerate(earlier)}
    rows = [{"work": work_item_to_json(w), "reuse": place_of[id(w.reuse)]} for w in work_items]
    return (
        ray.data.from_items(rows, override_num_blocks=len(rows))
        .map_batches(
            _TokeniseStage,
            fn_constructor_args=(job, earlier),
            batch_size=None,
            batch_format="pyarrow",
            num_cpus=TOKENISE_CPUS,
            compute=pool,
        )
        .map_batches(
            _LabelStage,
            fn_constructor_args=(job, any(work.asks for work in work_items)),
            batch_size=None,
            batch_format="pyarrow",
            compute=labelling,
            **device,
        )
        .map_batches(
            partial(commit_block, job=job),
            batch_size=None,
            batch_format="pyarrow",
            num_cpus=COMMIT_CPUS,
        )
    )


def label_cpus(threads: int) -> float:
    """The CPUs that a labelling actor asks for: a node's, but for what the other stages need.

    More than half of a node's, so that no two come to lie on one while another has none.
    """
    return threads - TOKENISE_CPUS - COMMIT_CPUS


class _TokeniseStage:
    """Builds `actor.Tokenise` on the worker."""

    def __init__(self, job: Job, earlier: Sequence[Sequence[ReusableShard]]) -> None:
        self._worker = _built(partial(_tokenise, job, earlier))

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        yield from self._worker(block)


class _LabelStage:
    """Builds `actor.LabelDocuments` on the worker, and keeps it on one thread.

    Ray Data builds a stage on one thread and calls it on another, and OpenMP keeps threads for
    each that ever used it: with more of them than cores they sleep between loops instead of
    spinning. On two cores that cost a fifth of the documents a second.
    """

    def __init__(self, job: Job, asks: bool) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="label")
        build = partial(_label_documents, job, asks)
        self._worker = self._thread.submit(_built, build).result()

    def __call__(self, block: pa.Table) -> pa.Table:
        table: pa.Table = self._thread.submit(self._worker, block).result()
        return table


def _built(build: Callable[[], Callable[[pa.Table], Result]]) -> Callable[[pa.Table], Result]:
    """The worker; where an error of ours keeps it from being built, what raises that when called.

    Ray tells an error in an actor's constructor as the actor's death, and its kind is lost.
    """
    try:
        return build()
    except AssayError as error:
        failure = error

    def fail(_block: pa.Table) -> Result:
        raise failure

    return fail


def _tokenise(
    job: Job, earlier: Sequence[Sequence[ReusableShard]]
) -> Callable[[pa.Table], Iterable[pa.Table]]:
    worker: Callable[[pa.Table], Iterable[pa.Table]] = importlib.import_module(
        "pipeline.runtime.worker"
    ).Tokenise(job, earlier)
    return worker


def _label_documents(job: Job, asks: bool) -> Callable[[pa.Table], pa.Table]:
    worker: Callable[[pa.Table], pa.Table] = importlib.import_module(
        "pipeline.runtime.worker"
    ).LabelDocuments(job, asks=asks)
    return worker


def _preflight(job: Job) -> None:
    importlib.import_module("pipeline.runtime.assembly").preflight(job)


def commit_block(block: pa.Table, job: Job) -> pa.Table:
    """Commits one labelled shard and gives its counts; fails closed on anything but one shard."""
    written = set(block.column("work").to_pylist())
    if len(written) != 1:
        raise StorageError(f"a block holds {len(written)} shards instead of one; nothing written")
    work = work_item_from_json(written.pop())
    files = [_label_file(block, task, job, work.retry) for task in work.tasks]
    store = open_store(job.spec.output, job.spec.storage_options)
    created = commit_shard(store, work.shard, block, files)
    if work.tasks:
        Attempts(store, attempt_name(job.fp, work), job.run_id).forget()
    counts = {
        "sid": work.shard.id,
        "rows": block.num_rows,
        "created": len(created.made),
        "status": Counter(block.column("label_status").to_pylist()),
        "labels": {file.task: _label_counts(file.table) for file in files},
        **json.loads(block.column("measured")[0].as_py()),
    }
    return pa.table({"counts": [json.dumps(counts)]})


def _label_file(block: pa.Table, task: str, job: Job, retry: int) -> LabelFile:
    table = answers_table(block, next(t for t in job.spec.tasks if t.name == task))
    fingerprint = job.fingerprints[task]
    metadata = {
        "task": task,
        "fp": fingerprint.id,
        "spec": fingerprint.json().decode(),
        "model": canonical_json(dict(job.files.hashes)).decode(),
        "versions": canonical_json(_versions(*_quantiser(job))).decode(),
    }
    known = f"known:{task}"
    if known in block.column_names:
        table = overlaid(table, block.column(known).combine_chunks())
    calibration = _calibration(block, task, job)
    if calibration is not None:
        table = with_calibrated(table, calibration)
        metadata["calibration"] = canonical_json(calibration.to_json()).decode()
    return LabelFile(task, fingerprint.id, table, metadata, retry)


def _calibration(block: pa.Table, task: str, job: Job) -> Calibration | None:
    """The task's calibration: read by the driver, or measured by the worker."""
    measured = f"calibration:{task}"
    if measured in block.column_names:
        return calibration_from_json(json.loads(block.column(measured)[0].as_py()))
    file = job.calibrations.get(task)
    return None if file is None else file.calibration


def _label_counts(table: pa.Table) -> dict[str, int]:
    counted = Counter(table.column("label").to_pylist())
    return {label: count for label, count in counted.items() if label is not None}


def _versions(*others: str) -> dict[str, str]:
    return {name: version(name) for name in ("assay", "torch", "transformers", *others)}


def _quantiser(job: Job) -> tuple[str, ...]:
    return ("torchao",) if job.spec.model.quantize != "none" else ()


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
    # — what ends a graph is raised here as well, and is told by whoever runs it, in one line
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
