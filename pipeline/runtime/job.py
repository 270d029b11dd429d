"""One job and its plan: model, fingerprints, shards, and the cells that are missing.

Entry points: `make_job` and `plan`. Opens no document. Must import neither
torch nor ray.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path

from pipeline.errors import Problem, SpecError
from pipeline.fitted.calibration import Calibration, CalibrationFile
from pipeline.fitted.cascade_file import Thresholds
from pipeline.hashes import canonical_json
from pipeline.inference.classifiers import RUNTIMES
from pipeline.ledger.cells import Committed, WorkItem, committed, remaining
from pipeline.ledger.columns import answer_columns
from pipeline.ledger.cuts import Cuts, load_or_cut
from pipeline.ledger.snapshots import SnapshotTask
from pipeline.runtime.classifier_files import find_classifiers
from pipeline.runtime.fitted_files import (
    find_readouts,
    load_calibrations,
    load_thresholds,
    warn_of_stale_calibrations,
)
from pipeline.runtime.placement import Placement, shard_bytes
from pipeline.runtime.weights import ModelFiles, locate, locate_known
from pipeline.sources.shards import MAX_SHARD_BYTES, Shard, Slice
from pipeline.sources.slices import check_where
from pipeline.sources.source import InputObject, find_objects
from pipeline.spec.fingerprint import Fingerprint, fingerprints
from pipeline.spec.model import NO_MODEL
from pipeline.spec.problems import placed_in_stage
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.store import Store, open_store

# Read by one process before Ray has started.
SMALL_INPUT_BYTES = 16 * 1024 * 1024
SMALL_INPUT_SHARDS = 256
Locate = Callable[..., ModelFiles]  # as `weights.locate`
# The number formats that `dtype: auto` may become.
_AUTO_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Job:
    """What every worker needs; sent to each worker once."""

    spec: JobSpec
    files: ModelFiles
    placement: Placement
    fingerprints: Mapping[str, Fingerprint]  # by task
    cache_dir: str
    run_id: str
    readouts: Mapping[str, str]  # the file's SHA-256 by part of a task, of those that have one
    calibrations: Mapping[str, CalibrationFile]  # by part, of the files that the spec names
    classifiers: Mapping[str, str]  # the file's SHA-256 by task, of those that have one
    thresholds: Mapping[str, Thresholds]  # by task, of those with a cascade
    # Of a job with tasks in stages: those that answer the stages, and with the first the other
    # tasks as well, in the order in which they read a document.
    stages: tuple[Job, ...] = ()
    stage: int = 0  # of such a job
    since: int = 0  # the number of the output's last snapshot when the run began
    shown: str = ""  # the key of an object of the output that each worker must see; "": of none
    began: float = field(default_factory=time.time)  # seconds since the epoch
    ends: float | None = None  # seconds since the epoch; no shard is begun after that

    @property
    def is_over(self) -> bool:
        """Whether the time of the run is over."""
        return self.ends is not None and time.time() >= self.ends

    @property
    def fp(self) -> dict[str, str]:
        """The id of each task's fingerprint."""
        return {name: fingerprint.id for name, fingerprint in self.fingerprints.items()}

    @property
    def with_stages(self) -> tuple[Job, ...]:
        """The job, and the jobs of its stages."""
        return (self, *self.stages)

    @property
    def readers(self) -> tuple[Job, ...]:
        """The jobs that read a document, one after the other."""
        return self.stages or (self,)

    def calibrations_of(self, task: TaskSpec) -> list[Calibration]:
        """The calibrations of the task's parts, in their order; none without a calibration."""
        files = [self.calibrations.get(part.name) for part in task.parts]
        return [file.calibration for file in files if file is not None]

    def metadata(self, task: TaskSpec) -> dict[str, str]:
        """The metadata of the task's label files: what answered."""
        fingerprint = self.fingerprints[task.name]
        model, packages = fingerprint.content.get("weights", {}), ["torch", "transformers"]
        if task.cascade is not None:
            model, packages = {}, []  # the stages' files have theirs
        elif task.classifier is not None:
            model = {task.classifier.kind: self.classifiers[task.name]}
            packages.append(RUNTIMES[task.classifier.kind][0])
        return {
            "task": task.name,
            "fp": fingerprint.id,
            "spec": fingerprint.json().decode(),
            "model": canonical_json(dict(model)).decode(),
            "models": canonical_json(self._models_of(task)).decode(),
            "versions": canonical_json(_versions(*packages)).decode(),
        }

    def _models_of(self, task: TaskSpec) -> dict[str, Mapping[str, str]]:
        """The hashes of the weights of each model that answers the task, by the model's name."""
        jobs = [job for job in self.stages if task.name in job.fp] if task.cascade else [self]
        contents = [(job.spec.model.name, job.fingerprints[task.name].content) for job in jobs]
        return {name: content["weights"] for name, content in contents if "weights" in content}

    @property
    def snapshot_tasks(self) -> dict[str, SnapshotTask]:
        return {
            task.name: SnapshotTask(self.fp[task.name], tuple(task.labels), answer_columns(task))
            for task in self.spec.tasks
        }


@dataclass(frozen=True, slots=True)
class PlanCounts:
    """What a run would compute. Also the JSON form of a dry run."""

    documents: int
    shards: int
    missing_documents: int
    missing_shards: int
    distinct_texts: int | None  # of the shards with work; None: not known
    missing_cells: int  # answers


@dataclass(frozen=True, slots=True)
class Plan:
    """All shards of the input, and what a LIST of the output shows of them."""

    cuts: Cuts
    done: Committed
    work_items: tuple[WorkItem, ...]
    distinct: int | None = None  # texts of the shards with work; None: not known
    # Documents in the slice, by shard id, where a dry run of a slice knows them.
    inside: Mapping[str, int] = field(default_factory=dict)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.cuts.shards

    @property
    def slice(self) -> Slice | None:
        """The documents that the plan is limited to."""
        return self.shards[0].slice if self.shards else None

    @property
    def rows(self) -> int:
        """The rows of the whole input."""
        return sum(shard.rows for shard in self.shards)

    @property
    def missing_shards(self) -> int:
        """The number of shards with work; one may have a work item for retries, too."""
        return len({work.shard.id for work in self.work_items})

    @property
    def counts(self) -> PlanCounts:
        """Counts of all documents and shards, and of the missing ones."""
        return PlanCounts(
            documents=self.rows,
            shards=len(self.shards),
            missing_documents=self.missing_rows,
            missing_shards=self.missing_shards,
            distinct_texts=self.distinct,
            missing_cells=sum(self.rows_of(work) * len(work.tasks) for work in self.work_items),
        )

    @property
    def unread(self) -> tuple[WorkItem, ...]:
        """A work item for each shard whose texts are not in the output yet."""
        shards = {work.shard.id: work for work in self.work_items if work.documents}
        return tuple(replace(work, tasks=()) for work in shards.values())

    @property
    def reads_little(self) -> bool:
        """Whether one process reads the unread shards faster than Ray starts."""
        shards = self.unread
        text_bytes = sum(work.shard.piece.text_bytes for work in shards)
        return len(shards) <= SMALL_INPUT_SHARDS and text_bytes <= SMALL_INPUT_BYTES

    @property
    def missing_rows(self) -> int:
        """The rows of the shards that have work; of a slice those in it, where they are known."""
        return sum({work.shard.id: self.rows_of(work) for work in self.work_items}.values())

    def rows_of(self, work: WorkItem) -> int:
        """The rows of an item's shard; of a slice those in it, where they are known."""
        return self.inside.get(work.shard.id, work.shard.rows)

    @property
    def rows_for_model(self) -> int:
        """The most documents that the model reads: of equal texts one, and none that is known."""
        asked: dict[str, int] = {}
        for work in self.work_items:
            rows = min(work.asked_rows, self.rows_of(work))
            asked[work.shard.id] = max(asked.get(work.shard.id, 0), rows)
        return sum(asked.values())

    @property
    def reuses(self) -> bool:
        """Whether some documents are answered by what is known of equal texts."""
        return any(work.sources or work.rows_without_answer is not None for work in self.work_items)

    @property
    def work_rows(self) -> int:
        """The rows of all work items, which progress counts."""
        return sum(work.shard.rows for work in self.work_items)


def make_job(
    spec: JobSpec, placement: Placement, cache_dir: Path, *, locate: Locate = locate
) -> Job:
    """The job of a spec, with its model located and its tasks' fingerprints computed."""
    stage_job = partial(_stage_job, placement=placement, cache_dir=cache_dir, locate=locate)
    stages = [
        stage_job(spec, own, number)
        for number, of_stage in enumerate(spec.stage_specs())
        for own in of_stage
    ]
    stage_versions = {
        task.name: [job.fp[task.name] for job in stages if task.name in job.fp]
        for task in spec.cascades
    }
    thresholds = load_thresholds(spec, stage_versions)
    files = locate(spec.model, cache_dir, sees_images=spec.input.image is not None)
    readouts = find_readouts(spec, weights=files.hashes, dtype=placement.dtype)
    calibrations = load_calibrations(spec)
    classifiers = find_classifiers(spec, cache_dir)
    versions = fingerprints(
        spec,
        weights=files.hashes,
        dtype=placement.dtype,
        readouts=readouts,
        calibrations={name: file.calibration.hash for name, file in calibrations.items()},
        classifiers=classifiers,
        cascades={name: own.content for name, own in thresholds.items()},
    )
    return Job(
        spec,
        files,
        placement,
        versions,
        cache_dir=str(cache_dir),
        run_id=uuid.uuid4().hex,
        readouts=readouts,
        calibrations=calibrations,
        classifiers=classifiers,
        thresholds=thresholds,
        stages=tuple(stages),
    )


def _stage_job(
    spec: JobSpec,
    own: JobSpec,
    number: int,
    *,
    placement: Placement,
    cache_dir: Path,
    locate: Locate,
) -> Job:
    """The job of a spec that answers some stages; `auto` is the number format of the whole job."""
    if own.model != NO_MODEL:
        own = in_format(own, placement.dtype)
        placement = replace(placement, dtype=own.model.dtype)
    with placed_in_stage(spec, own, number):
        job = make_job(own, placement, cache_dir, locate=locate)
    return replace(job, stage=number)


def in_format(spec: JobSpec, dtype: str) -> JobSpec:
    """The spec with this number format where it says `auto`."""
    if spec.model.dtype != "auto":
        return spec
    return spec.model_copy(update={"model": spec.model.model_copy(update={"dtype": dtype})})


def jobs_for_each_dtype(
    spec: JobSpec, cache_dir: Path, *, locate: Locate = locate_known
) -> list[Job]:
    """The job in each number format that a machine may choose for it.

    Formats in which the readouts were not fitted are left out. SpecError if no format remains, or
    if a model would be downloaded for its hashes.
    """
    dtypes = _AUTO_DTYPES if spec.model.dtype == "auto" else (spec.model.dtype,)
    jobs: list[Job] = []
    errors: list[SpecError] = []
    for dtype in dtypes:
        try:
            place = Placement("cpu", dtype, 1, 1)
            jobs.append(make_job(spec, place, cache_dir, locate=locate))
        except SpecError as error:
            errors.append(error)
    if not jobs:
        raise errors[0]
    return jobs


def plan(job: Job, store: Store, *, keep: bool = True, part: Slice | None = None) -> Plan:
    """The job's shards and their missing cells; new input files are cut into shards here.

    With `keep` the cut is stored for every later run. Only a run that labels stores it, because the
    size of the shards depends on its machine. With a slice, the plan is of its documents alone;
    where the whole input is labelled already, it is the plan of the whole, which has no work.
    """
    warn_of_stale_calibrations(job.calibrations, job.fingerprints)
    source = job.spec.input
    objects = _objects(job.spec, store, Path(job.cache_dir))
    largest = max(stage.files.size_bytes for stage in job.with_stages)
    usual = shard_bytes(job.placement.device, largest)
    target = usual if source.shard_bytes == "auto" else source.shard_bytes
    cuts = load_or_cut(store, objects, source.columns, target, keep=keep)
    if part is not None and part.where is not None:
        check_where(part.where, cuts.shards, source.storage_options)
    whole = list_missing(job, store, cuts)
    if part is None or not whole.work_items:
        return whole
    sliced = tuple(replace(shard, slice=part) for shard in cuts.shards)
    return list_missing(job, store, replace(cuts, shards=sliced))


def check_places(spec: JobSpec, cache_dir: Path) -> None:
    """The checks of output and input that need no model; SpecError or RefusedError.

    The rows and columns of a large input are checked later, because they take a while to count.
    """
    store, source = open_store(spec.output, spec.storage_options), spec.input
    objects = _objects(spec, store, cache_dir)
    if sum(item.size_bytes for item in objects) <= SMALL_INPUT_BYTES:
        load_or_cut(store, objects, source.columns, MAX_SHARD_BYTES, keep=False)


def _objects(spec: JobSpec, store: Store, cache_dir: Path) -> list[InputObject]:
    """The input's files; SpecError if there are none, or if the path is in the output."""
    source, url = spec.input, store.url
    objects = find_objects(source.path, cache_dir, source.storage_options, output=url)
    # — a local path may lead into the output by a link
    real: Callable[[str], str] = str if "://" in url else os.path.realpath
    inside = [item.path for item in objects if real(item.path).startswith(f"{real(url)}/")]
    if inside:  # a run would label its own results
        fix = f"{len(inside)} of its files are in the output {store.url}; name another output"
        raise SpecError([Problem("input.path", fix, inside[0])])
    return objects


def list_missing(job: Job, store: Store, cuts: Cuts) -> Plan:
    """The plan for these shards, from a LIST of the output."""
    done = committed(store, job.fp, frozenset(shard.id for shard in cuts.shards))
    items = remaining(cuts.shards, list(job.fp), done)
    return Plan(cuts, done, tuple(_asked(job, item) for item in items))


def _asked(job: Job, item: WorkItem) -> WorkItem:
    """The work item, of which the model reads nothing if classifiers answer its tasks."""
    by_model = {task.name for reader in job.readers for task in reader.spec.model_tasks}
    return item if by_model.intersection(item.tasks) else replace(item, rows_without_answer=0)


@cache
def _versions(*packages: str) -> dict[str, str]:
    """The versions of assay and of these packages; they are read from the disk once."""
    return {"assay": version("corpus-assay"), **{name: version(name) for name in packages}}
