"""One job, planned: what is asked, where everything is, and which cells are missing.

Knows the spec, the ledger and this machine. Opens no document. Knows nothing of torch or Ray.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import Problem, SpecError
from pipeline.ledger.cells import (
    Committed,
    WorkItem,
    committed,
    committed_others,
    missing_tasks,
    remaining,
)
from pipeline.ledger.columns import answer_columns
from pipeline.ledger.cuts import Cuts, load_or_cut
from pipeline.ledger.snapshots import SnapshotTask
from pipeline.runtime.calibrations import (
    CalibrationFile,
    calibration_hash,
    load_calibrations,
    versions_with_equal_raw_answers,
    warn_of_stale_calibrations,
)
from pipeline.runtime.fitted_files import ReadoutRef, find_readouts
from pipeline.runtime.placement import Placement
from pipeline.runtime.weights import ModelFiles, locate
from pipeline.sources.shards import MAX_SHARD_BYTES, Shard
from pipeline.sources.source import InputObject, find_objects
from pipeline.spec.fingerprint import Fingerprint, fingerprints
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store

# A shard is what a crash costs: about a minute of one worker, at a rate it will reach roughly.
_SHARD_SECONDS = 60
_FLOPS = {"cpu": 100e9, "cuda": 200e12}
_BYTES_PER_TOKEN = 4
_MIN_SHARD_BYTES = 32 * 1024
# The numbers that a machine may compute in where the spec leaves it the choice.
_AUTO_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Job:
    """What every worker needs to know; travels to each of them once."""

    spec: JobSpec
    files: ModelFiles
    placement: Placement
    fingerprints: Mapping[str, Fingerprint]  # by task
    cache_dir: str
    run_id: str
    readouts: Mapping[str, ReadoutRef]  # by task, of those that have one
    calibrations: Mapping[str, CalibrationFile]  # by task; `graph.calibrate` adds contextual ones
    began: float = field(default_factory=time.time)  # seconds since the epoch

    @property
    def fp(self) -> dict[str, str]:
        """Every task's fingerprint id."""
        return {name: fingerprint.id for name, fingerprint in self.fingerprints.items()}

    @property
    def snapshot_tasks(self) -> dict[str, SnapshotTask]:
        return {
            task.name: SnapshotTask(self.fp[task.name], tuple(task.labels), answer_columns(task))
            for task in self.spec.tasks
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """All shards of the input, and what a LIST of the output found of them."""

    cuts: Cuts
    done: Committed
    work_items: tuple[WorkItem, ...]

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.cuts.shards

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def missing_shards(self) -> int:
        """How many shards have work; one may have several work items, for its tasks in parts."""
        return len({work.shard.id for work in self.work_items})

    @property
    def missing_rows(self) -> int:
        """The rows of the shards that have work."""
        return sum({work.shard.id: work.shard.rows for work in self.work_items}.values())

    @property
    def work_rows(self) -> int:
        """The rows of all work items: what is counted as they go."""
        return sum(work.shard.rows for work in self.work_items)


def make_job(spec: JobSpec, placement: Placement, cache_dir: Path) -> Job:
    """The job of a spec: its model found and named by content, its tasks by fingerprint."""
    files = locate(spec.model, cache_dir)
    dtype = placement.dtype
    readouts = find_readouts(spec, weights=files.hashes, dtype=dtype)
    calibrations = load_calibrations(spec)
    versions = fingerprints(
        spec,
        weights=files.hashes,
        dtype=dtype,
        readouts={name: ref.sha256 for name, ref in readouts.items()},
        calibrations={name: calibration_hash(file) for name, file in calibrations.items()},
    )
    return Job(
        spec,
        files,
        placement,
        versions,
        str(cache_dir),
        run_id=uuid.uuid4().hex,
        readouts=readouts,
        calibrations=calibrations,
    )


def jobs_for_each_dtype(spec: JobSpec, cache_dir: Path) -> list[Job]:
    """The job in each number format that a machine may choose for it.

    A format in which its readouts were not fitted is left out: no run can choose it. SpecError
    where none is left.
    """
    dtypes = _AUTO_DTYPES if spec.model.dtype == "auto" else (spec.model.dtype,)
    jobs: list[Job] = []
    refused: list[SpecError] = []
    for dtype in dtypes:
        try:
            jobs.append(make_job(spec, Placement("cpu", dtype, 1, 1), cache_dir))
        except SpecError as error:
            refused.append(error)
    if not jobs:
        raise refused[0]
    return jobs


def plan(job: Job, store: Store, *, keep: bool = True) -> Plan:
    """The job's shards and what is missing of them; an input that is new is cut here.

    The cut lasts, and is made for the job's own machine: what does not label does not `keep` it.
    """
    warn_of_stale_calibrations(job.calibrations, job.fingerprints)
    wanted = job.spec.input
    objects = find_objects(wanted.path, Path(job.cache_dir), wanted.storage_options)
    refuse_own_output(objects, store.url)
    target = wanted.shard_bytes if wanted.shard_bytes != "auto" else shard_bytes(job)
    cuts = load_or_cut(store, objects, wanted.text, wanted.id, target, keep=keep)
    return list_missing(job, store, cuts)


def refuse_own_output(objects: Sequence[InputObject], output: str) -> None:
    """SpecError if the input takes in the output: a run would label its own results."""
    inside = [found.path for found in objects if found.path.startswith(f"{output}/")]
    if inside:
        fix = f"{len(inside)} of its files lie in the output {output}; keep the two apart"
        raise SpecError([Problem("input.path", fix, inside[0])])


def list_missing(job: Job, store: Store, cuts: Cuts) -> Plan:
    """What a LIST now finds of these shards."""
    sids = cuts.earlier_sids.union(shard.id for shard in cuts.shards)
    done = committed(store, job.fp, sids)
    missing = missing_tasks(cuts.shards, list(job.fp), done)
    versions = {task: job.fingerprints[task] for task in missing}
    others = committed_others(store, done, versions_with_equal_raw_answers(store, versions), sids)
    items = remaining(cuts.shards, list(job.fp), done, cuts.earlier, others)
    return Plan(cuts, done, tuple(items))


def shard_bytes(job: Job) -> int:
    """A shard's weight, in bytes of text: about a minute of one worker with this model."""
    parameters = max(1, job.files.size_bytes // 2)
    tokens = _SHARD_SECONDS * _FLOPS[job.placement.device] / (2 * parameters)
    return int(min(MAX_SHARD_BYTES, max(_MIN_SHARD_BYTES, tokens * _BYTES_PER_TOKEN)))
