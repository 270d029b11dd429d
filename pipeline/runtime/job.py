"""One job: its readers, the steps that they answer, and the fingerprints of its tasks.

Entry point: `make_job`; `make_reader` for a command that asks a model without a ledger. Must import
neither torch nor Ray.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

from pipeline.errors import Problem, SpecError
from pipeline.fitted.certificate import Certificate, Thresholds
from pipeline.hashes import canonical_json
from pipeline.inference.classifiers import RUNTIMES
from pipeline.ledger.cells import stored_fps, stored_version
from pipeline.ledger.columns import answer_columns
from pipeline.ledger.snapshots import SnapshotTask, headers
from pipeline.runtime.cascades import certificate_of, decided_by
from pipeline.runtime.conditions import tasks_named
from pipeline.runtime.fitted_files import find_classifiers, find_readouts
from pipeline.runtime.placement import Placement, place, this_machine
from pipeline.runtime.weights import ModelFiles, locate, model_at, model_config
from pipeline.sources.streams import Options
from pipeline.spec.fingerprint import Fingerprint, cascade_fingerprint, fingerprints
from pipeline.spec.model import NO_MODEL, ModelSpec
from pipeline.spec.schema import JobSpec
from pipeline.spec.stages import EncoderTask, StageSpec
from pipeline.spec.tasks import CascadeTask, TaskSpec
from pipeline.stores.store import Store

Locate = Callable[[ModelSpec, Path], ModelFiles]  # as `weights.locate`
_LOCATE_KNOWN = partial(locate, downloads=False)
# The number formats that `dtype: auto` may become.
_AUTO_DTYPES = ("float32", "bfloat16", "float16")
# What a stage of a cascade may have of its own, and where all other tasks have it.
_SHARED = {"model": "model", "documents": "documents"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reader:
    """A model with its fitted files, and classifiers: what answers some tasks together."""

    spec: JobSpec  # of the job, with this model and these tasks
    files: ModelFiles
    placement: Placement
    readouts: Mapping[str, str]  # the file's SHA-256 by part of a task, of those that have one
    classifiers: Mapping[str, str]  # the file's SHA-256 by task, of those that have one
    cache_dir: str
    places: Mapping[str, str]  # by task, of `model` and of `documents`: the place in the job's spec

    @property
    def fingerprints(self) -> dict[str, Fingerprint]:
        """By task, without conditions."""
        return fingerprints(
            self.spec,
            weights=self.files.hashes,
            dtype=self.placement.dtype,
            readouts=self.readouts,
            classifiers=self.classifiers,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """What one reader answers of a task: all of it, or one stage of its cascade."""

    task: str
    stage: int  # from 0
    reader: int  # of `Job.readers`
    asked: TaskSpec  # what the reader answers
    fingerprint: Fingerprint
    thresholds: Thresholds | None  # of a cascade's stage: which of its answers decide

    @property
    def version(self) -> str:
        """The name of the version of the task that the step answers."""
        return f"{self.task}/{self.fingerprint.id}"

    @property
    def by_model(self) -> bool:
        """Whether a model answers, and not a classifier."""
        return self.asked.classifier is None


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job: its id, its condition, and when it ends."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    limit: str | None = None  # the condition of the run: SQL, as `conditions.limit_of` makes it
    since: int = 0  # the number of the output's last snapshot when the run began
    shown: str = ""  # the key of an object of the output that each worker must see; "": of none
    input_folder: str = ""  # on a disk, which each worker must see, too
    began: float = field(default_factory=time.time)  # seconds since the epoch
    ends: float | None = None  # seconds since the epoch; no shard is begun after that
    max_cost: float | None = None  # of the model's server
    unable: frozenset[str] = frozenset()  # ids of nodes of the cluster that run nothing

    @property
    def is_over(self) -> bool:
        """Whether the time of the run is over."""
        return self.ends is not None and time.time() >= self.ends


@dataclass(frozen=True, slots=True)
class Job:
    """What every worker needs; sent to each worker once."""

    spec: JobSpec
    readers: tuple[Reader, ...]  # in the order in which they read a document
    steps: tuple[Step, ...]  # those of one task are next to each other, in their order
    fingerprints: Mapping[str, Fingerprint]  # by task
    placement: Placement
    cache_dir: str
    run: Run
    # By task with a cascade, what the output proves of it: of no shards, where that is nothing.
    cascades: Mapping[str, Certificate] = field(default_factory=dict)

    @property
    def fp(self) -> dict[str, str]:
        """The id of each task's fingerprint."""
        return {name: fingerprint.id for name, fingerprint in self.fingerprints.items()}

    @property
    def versions(self) -> list[tuple[str, Fingerprint]]:
        """What the job writes: each task's own version, and those of a cascade's stages."""
        stages = [(s.task, s.fingerprint) for s in self.steps if s.thresholds is not None]
        return [*self.fingerprints.items(), *stages]

    def named_by(self, task: str) -> Sequence[str]:
        """The tasks that the condition of a task names."""
        when = self.fingerprints[task].content.get("when")
        return () if when is None else [*when["tasks"]]

    def metadata(self, fingerprint: Fingerprint, steps: Sequence[Step]) -> dict[str, str]:
        """The metadata of a label file of this version, which these steps answer."""
        task, packages = steps[0].task, ["torch", "transformers"]
        model = dict(fingerprint.content.get("weights", {}))
        if len(steps) > 1:
            model, packages = {}, []  # the stages' files have theirs
        elif (classifier := steps[0].asked.classifier) is not None:
            model = {classifier.kind: self.readers[steps[0].reader].classifiers[task]}
            packages.append(RUNTIMES[classifier.kind][0])
        models = {
            self.readers[step.reader].spec.model.name: step.fingerprint.content["weights"]
            for step in steps
            if step.by_model
        }
        return {
            "task": task,
            "fp": fingerprint.id,
            "spec": fingerprint.json().decode(),
            "model": canonical_json(model).decode(),
            "models": canonical_json(models).decode(),
            "versions": canonical_json(_versions(*packages)).decode(),
        }

    @property
    def snapshot_tasks(self) -> dict[str, SnapshotTask]:
        return {
            task.name: SnapshotTask(
                self.fp[task.name], tuple(task.labels), answer_columns(task, self.spec.documents)
            )
            for task in self.spec.tasks
        }


def make_job(
    spec: JobSpec, placement: Placement, cache_dir: Path, *, locate: Locate = locate
) -> Job:
    """The job of a spec, with its models located and its tasks' fingerprints computed.

    A cascade has the stages and the thresholds that the output has a certificate of. Without one,
    or if by it nothing is saved, the last stage answers alone: the spec of the job has
    that stage in the task's place.
    """
    readers, raw = _readers(spec, placement, cache_dir, locate)
    cascades: dict[str, Certificate] = {}
    conditions: dict[str, dict[str, object]] = {}
    versions: dict[str, Fingerprint] = {}
    for task in spec.tasks:
        when = conditions[task.name] = _condition(spec, task, versions)
        stages = [step.fingerprint for step in raw[task.name]]
        version = stages[-1]  # — of a cascade, the whole model
        if isinstance(task, CascadeTask):
            scope: dict[str, object] = {"spec": spec.name, **when}
            if task.cascade.teacher is not None:  # — readouts are of another model
                model, student = spec.model, locate(spec.model, cache_dir)
                _check_student(student, model.storage_options)
                scope["student"] = [student.id, placement.dtype, model.rounded_to, model.kv]
            proved = cascades[task.name] = certificate_of(spec, task, stages, scope)
            if proved.thresholds is not None:
                version = cascade_fingerprint(task, proved.content)
        versions[task.name] = version.under(**when)
    if cascades:
        spec = decided_by(spec, cascades)
        readers, raw = _readers(spec, placement, cache_dir, locate)
    steps: list[Step] = []
    for task in spec.tasks:
        chosen = cascades[task.name].thresholds if task.name in cascades else None
        steps += _under_conditions(raw[task.name], conditions[task.name], chosen)
    return Job(spec, readers, tuple(steps), versions, placement, str(cache_dir), Run(), cascades)


def _readers(
    spec: JobSpec, placement: Placement, cache_dir: Path, locate: Locate
) -> tuple[tuple[Reader, ...], dict[str, list[Step]]]:
    """The readers of a spec, and by task the steps that they answer, without conditions."""
    readers: list[Reader] = []
    raw: dict[str, list[Step]] = {task.name: [] for task in spec.tasks}
    for own, places in reader_specs(spec):
        where = placement
        if own.model != NO_MODEL:  # — `auto` is the number format of the whole job
            own = in_format(own, placement.dtype)
            if not own.model.chooses_dtype:
                where = replace(placement, dtype=own.model.dtype)
        reader = _reader(own, where, cache_dir, locate, places)
        for task, content in zip(own.tasks, reader.fingerprints.values(), strict=True):
            before = raw[task.name]
            before.append(Step(task.name, len(before), len(readers), task, content, None))
        readers.append(reader)
    return tuple(readers), raw


def _condition(
    spec: JobSpec, task: TaskSpec, versions: Mapping[str, Fingerprint]
) -> dict[str, object]:
    """The task's condition, with the versions of the tasks before it that it names."""
    if task.when is None:
        return {}
    number = spec.tasks.index(task)
    named = tasks_named(task.when, spec.tasks[:number], place=f"tasks.{number}.when")
    return {"when": {"sql": task.when, "tasks": {name: versions[name].id for name in named}}}


def _check_architecture(spec: JobSpec, files: ModelFiles, places: Mapping[str, str]) -> None:
    """SpecError unless the model has a head that classifies, or sees images, where that is asked.

    Tasks with nothing but labels need the head.
    """
    config = model_config(files, spec.model.storage_options)
    if spec.input.image is not None and not config.get("vision_config"):
        fix = "this model has no vision tower, and input.image needs one; name a model that sees"
        raise SpecError(
            [Problem("model.path", f"{fix} images, or remove input.image", files.location)]
        )
    if spec.uses_encoder and not _classifies(config):
        fix = "missing; add it: a language model is asked; only a sequence classifier answers"
        alone = [places[task.name] for task in spec.tasks if isinstance(task, EncoderTask)]
        raise SpecError([Problem(f"{place}.question", f"{fix} without") for place in alone])


def _check_student(files: ModelFiles, options: Options) -> None:
    """SpecError of a model that a run cannot teach."""
    if _classifies(model_config(files, options)):
        fix = "only classifies, and no readout of its layers can be fitted; name a language model"
        raise SpecError([Problem("model.path", fix, files.location)])


def _classifies(config: Mapping[str, Any]) -> bool:
    """Whether a model has the head of a sequence classifier."""
    return any("Classification" in str(name) for name in config.get("architectures") or ())


def _under_conditions(
    raw: Sequence[Step], when: Mapping[str, object], thresholds: Thresholds | None
) -> list[Step]:
    """The steps of a task under its condition; later stages also under what the others decide."""
    steps: list[Step] = []
    for step in raw:
        after = None
        if steps and thresholds is not None:
            after = {"stage": steps[-1].fingerprint.id, "thresholds": asdict(thresholds)}
        own = step.fingerprint.under(**when, after=after)
        steps.append(replace(step, fingerprint=own, thresholds=thresholds))
    return steps


def limited(job: Job, limit: str | None) -> Job:
    """The job under the condition of a run, which skips all other documents."""
    return replace(
        job,
        fingerprints={name: own.under(limit=limit) for name, own in job.fingerprints.items()},
        steps=tuple(replace(s, fingerprint=s.fingerprint.under(limit=limit)) for s in job.steps),
        run=replace(job.run, limit=limit),
    )


def make_reader(spec: JobSpec, placement: Placement, cache_dir: Path) -> Reader:
    """The reader of the spec's model, whatever the conditions of its tasks.

    Of a cascade it has the last stage, where that has no model and no documents of its own.
    """
    places = {task.name: f"tasks.{number}" for number, task in enumerate(spec.tasks)}
    plain = spec.model_copy(update={"tasks": spec.own_tasks})
    return _reader(plain, placement, cache_dir, locate, places | _SHARED)


def reader_specs(spec: JobSpec) -> Iterator[tuple[JobSpec, dict[str, str]]]:
    """For each reader, the spec of what it is asked, without conditions, and the places of its
    keys.

    Stages of one number that read as much of a document by one model are answered together: the
    first ones with the other tasks. The places are those of the tasks, by name, and of the `model`
    and the `documents`.
    """
    readers = [(0, spec.model, spec.documents, list[StageSpec](), {**_SHARED})]
    for index, task in enumerate(spec.tasks):
        unconditional = cast(StageSpec, task.model_copy(update={"when": None}))
        for number, stage in enumerate(task.stages or (unconditional,)):
            place = f"tasks.{index}" + (f".cascade.stages.{number}" if task.stages else "")
            key = number, stage.model or spec.model, stage.documents or spec.documents
            same = next((each for each in readers if each[:3] == key), None)
            if same is None:
                of_own = {k: f"{place}.{k}" if getattr(stage, k) else k for k in _SHARED}
                readers.append(same := (*key, [], of_own))
            *_, stages, places = same
            stages.append(stage)
            places[task.name] = place
    for _, model, documents, tasks, places in sorted(readers, key=itemgetter(0)):
        if tasks:
            own = {"model": model, "documents": documents, "tasks": tuple(tasks)}
            yield spec.model_copy(update=own), places


def _reader(
    spec: JobSpec, placement: Placement, cache_dir: Path, locate: Locate, places: Mapping[str, str]
) -> Reader:
    with model_at(places["model"]):
        files = locate(spec.model, cache_dir)
        if files.kind != "none" and (spec.uses_encoder or spec.input.image is not None):
            _check_architecture(spec, files, places)
    dtype = placement.dtype
    readouts = find_readouts(spec, cache_dir, weights=files.hashes, dtype=dtype, places=places)
    classifiers = find_classifiers(spec, cache_dir, places=places)
    return Reader(spec, files, placement, readouts, classifiers, str(cache_dir), places)


def in_format(spec: JobSpec, dtype: str) -> JobSpec:
    """The spec with this number format in place of `auto`."""
    if spec.model.dtype != "auto":
        return spec
    return spec.model_copy(update={"model": spec.model.model_copy(update={"dtype": dtype})})


def job_of_output(
    spec: JobSpec, store: Store, cache_dir: Path, *, locate: Locate = _LOCATE_KNOWN
) -> Job:
    """The job in the number format in which the output was answered, where the spec fixes none.

    Without answers, it is the format of a run on this machine, or on the GPUs that it lacks.
    SpecError if a model would be downloaded for its hashes.
    """
    dtype = _answered_in(spec, store) if spec.model.chooses_dtype else spec.model.dtype
    if dtype is None:
        try:
            dtype = place(spec.model, this_machine()).dtype
        except SpecError:
            dtype = "bfloat16"
        if spec.model_tasks and not any(stored_fps(store, task.name) for task in spec.tasks):
            words = "%s: has no answers yet; the number format is assumed: %s"
            logger.info(words, store.url, dtype)
    return make_job(spec, Placement("cpu", dtype, 1, 1), cache_dir, locate=locate)


def _answered_in(spec: JobSpec, store: Store) -> str | None:
    """The number format of the newest answers of the spec's model in the output; None: of none."""
    last = next(headers(store, spec.name, skip_damaged=True), None)
    tasks = {} if last is None else last["tasks"]
    names = [task.name for task in spec.tasks]
    published = [(name, tasks[name]["fp"]) for name in names if name in tasks]
    stored = ((name, fp) for name in names for fp in stored_fps(store, name))
    for task, fp in chain(published, stored):
        dtype = stored_version(store, task, fp).content.get("dtype")
        if dtype in _AUTO_DTYPES:
            return str(dtype)
    return None


@cache
def _versions(*packages: str) -> dict[str, str]:
    """The versions of assay and of these packages; they are read from the disk once."""
    return {"assay": version("corpus-assay"), **{name: version(name) for name in packages}}
