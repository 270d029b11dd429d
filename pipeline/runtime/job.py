"""One job: its model, its fitted files, and the fingerprints of its tasks.

Entry point: `make_job`. Must import neither torch nor Ray.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path

from pipeline.errors import SpecError
from pipeline.fitted.cascade_file import Thresholds
from pipeline.hashes import canonical_json
from pipeline.inference.classifiers import RUNTIMES
from pipeline.ledger.columns import answer_columns
from pipeline.ledger.snapshots import SnapshotTask
from pipeline.runtime.classifier_files import find_classifiers
from pipeline.runtime.conditions import tasks_named
from pipeline.runtime.fitted_files import find_readouts, load_thresholds
from pipeline.runtime.placement import Placement
from pipeline.runtime.weights import ModelFiles, locate, locate_known
from pipeline.sources.shards import Slice
from pipeline.spec.fingerprint import Fingerprint, fingerprints
from pipeline.spec.model import NO_MODEL
from pipeline.spec.problems import placed_in_stage
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec

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
    classifiers: Mapping[str, str]  # the file's SHA-256 by task, of those that have one
    thresholds: Mapping[str, Thresholds]  # by task, of those with a cascade
    # Of a job with tasks in stages: those that answer the stages, and with the first the other
    # tasks as well, in the order in which they read a document.
    stages: tuple[Job, ...] = ()
    stage: int = 0  # of such a job
    slice: Slice | None = None  # the documents to which the run is limited
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

    def named_by(self, task: str) -> Sequence[str]:
        """The tasks that the condition of a task names."""
        when = self.fingerprints[task].content.get("when")
        return () if when is None else [*when["tasks"]]

    @property
    def with_stages(self) -> tuple[Job, ...]:
        """The job, and the jobs of its stages."""
        return (self, *self.stages)

    @property
    def readers(self) -> tuple[Job, ...]:
        """The jobs that read a document, one after the other."""
        return self.stages or (self,)

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
    classifiers = find_classifiers(spec, cache_dir)
    versions = fingerprints(
        spec,
        weights=files.hashes,
        dtype=placement.dtype,
        readouts=readouts,
        classifiers=classifiers,
        cascades={name: own.content for name, own in thresholds.items()},
    )
    versions, stages = _under_conditions(spec, versions, stages, thresholds)
    return Job(
        spec,
        files,
        placement,
        versions,
        cache_dir=str(cache_dir),
        run_id=uuid.uuid4().hex,
        readouts=readouts,
        classifiers=classifiers,
        thresholds=thresholds,
        stages=tuple(stages),
    )


def _under_conditions(
    spec: JobSpec,
    versions: Mapping[str, Fingerprint],
    stages: Sequence[Job],
    thresholds: Mapping[str, Thresholds],
) -> tuple[dict[str, Fingerprint], list[Job]]:
    """The versions with the tasks' conditions, and the jobs of the stages with theirs."""
    own: dict[str, Fingerprint] = {}
    conditions: dict[str, dict[str, object]] = {}
    for place, task in enumerate(spec.tasks):
        conditions[task.name] = {}
        if task.when is not None:
            named = tasks_named(task.when, spec.tasks[:place], place=f"tasks.{place}.when")
            named_versions = {name: own[name].id for name in named}
            conditions[task.name] = {"when": {"sql": task.when, "tasks": named_versions}}
        own[task.name] = versions[task.name].under(**conditions[task.name])
    before: dict[str, str] = {}  # by task, the stage before
    conditioned = []
    for job in stages:
        of_stage = {}
        for name, raw in job.fingerprints.items():
            after = None
            if name in before:
                chosen = thresholds[name]
                bounds = [chosen.positive, chosen.low, chosen.high]
                after = {"stage": before[name], "thresholds": bounds}
            of_stage[name] = raw.under(**conditions[name], after=after)
        before |= {name: of_stage[name].id for name in of_stage.keys() & thresholds.keys()}
        conditioned.append(replace(job, fingerprints=of_stage))
    return own, conditioned


def sliced(job: Job, part: Slice) -> Job:
    """The job of the documents in a slice alone; other documents are skipped."""
    limited = {name: v.under(**part.to_json()) for name, v in job.fingerprints.items()}
    stages = tuple(sliced(stage, part) for stage in job.stages)
    return replace(job, fingerprints=limited, stages=stages, slice=part)


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


@cache
def _versions(*packages: str) -> dict[str, str]:
    """The versions of assay and of these packages; they are read from the disk once."""
    return {
        "assay": version("corpus-assay"),
        **{name: version(name) for name in packages},
    }
