"""Makes a task's calibration file from its answers in the output, and gold labels.

Entry point: `calibrate`. A task of kind `multi` has a file for each label, in a folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar
from sklearn.isotonic import IsotonicRegression

from pipeline.errors import Option, Problem, SpecError, option_error
from pipeline.evaluation.metrics import Floats, Ints
from pipeline.evaluation.readout_fitting import log_losses
from pipeline.fitted.calibration import (
    FORMAT,
    Calibration,
    CalibrationFile,
    Curve,
    Isotonic,
    Temperature,
    curves_for,
    log_p,
    mean_prior,
)
from pipeline.gold.answers import (
    GoldAnswers,
    answers_for,
    part_probabilities,
    sampling_of,
)
from pipeline.gold.fitted_texts import LEAST_ROWS, readout_texts, source_texts
from pipeline.gold.labels import Gold, gold_hash, read_gold, warn_of_chosen
from pipeline.gold.values import UNLABELLED
from pipeline.ledger.cells import stored_version
from pipeline.ledger.columns import RAW
from pipeline.ledger.dataset import open_labels
from pipeline.ledger.snapshots import Contents, contents, snapshot_numbers
from pipeline.options import CalibrateOptions, GoldColumns
from pipeline.runtime.fitted_files import options_for
from pipeline.runtime.job import jobs_for_each_dtype
from pipeline.sources.shards import fields_of
from pipeline.spec.labels import part_file
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.named_files import new_file
from pipeline.stores.store import Store, open_store

_SUFFIX = ".json"
# Beyond these limits, answers are nearly one-hot or nearly uniform.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated(Calibration):
    """The path of a calibration file, and its content. Also the JSON form."""

    path: str
    format: int = FORMAT
    task: str
    fingerprint: str
    source: Mapping[str, Any]
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedLabels:
    """The calibration files of a task of kind `multi`. Also the JSON form."""

    path: str  # the folder
    task: str
    labels: Mapping[str, Calibrated]


def calibrate(
    spec: JobSpec,
    options: CalibrateOptions,
    *,
    gold_options: GoldColumns = GoldColumns(),
    cache_dir: Path,
) -> Calibrated | CalibratedLabels:
    """Writes the calibration file of a task at `options.to`; of kind `multi`, one for each label.

    The same answers and gold labels give the same bytes. Gold rows with a text that the task's
    readout was fitted to are left out. Nothing is written unless all files can be.

    Raises:
        SpecError: The task, the method or the snapshot is wrong, a file exists, or the gold has too
            few other labels.
    """
    task = _task(spec, options)
    if task.kind == "multi" and options.to.endswith(_SUFFIX):
        fix = "is one file, and each label has one; name a folder"
        raise option_error("to", fix, options.to)
    is_multi = task.kind == "multi"
    labels = list(task.labels) if is_multi else [task.name]
    paths = [part_file(options.to, label, _SUFFIX) if is_multi else options.to for label in labels]
    targets = [
        new_file(path, options_for(path, spec), overwrite=options.overwrite) for path in paths
    ]
    store = open_store(spec.output, spec.storage_options)
    snapshot = _snapshot(spec, store, options, cache_dir)
    fp = stored_version(store, task.name, snapshot.tasks[task.name].fp).raw.id
    files = _files(spec, task, options, gold_options, snapshot, fp)
    for target, file in zip(targets, files, strict=True):
        target.write(file.json())
    calibrated = {
        label: Calibrated(
            **fields_of(file.calibration),
            path=path,
            task=file.task,
            fingerprint=file.fingerprint,
            source=file.source,
            rows=file.rows,
        )
        for label, path, file in zip(labels, paths, files, strict=True)
    }
    if is_multi:
        return CalibratedLabels(path=options.to, task=task.name, labels=calibrated)
    return calibrated[task.name]


def _files(
    spec: JobSpec,
    task: TaskSpec,
    options: CalibrateOptions,
    gold_options: GoldColumns,
    snapshot: Contents,
    fp: str,  # of the raw answers
) -> list[CalibrationFile]:  # of each part of the task
    if options.gold is None:
        return [
            CalibrationFile(part.name, calibration, fp, {"snapshot": snapshot.number}, rows)
            for part, (calibration, rows) in zip(
                task.parts, _batch(spec, task, snapshot), strict=True
            )
        ]
    gold = read_gold(options.gold, spec, gold_options.of_task(task.name))
    if absent := [part.name for part in task.parts if part.name not in gold.tasks]:
        fix = "has no gold of these labels, and each has a calibration of its own; add them"
        raise option_error("gold", fix, absent)
    warn_of_chosen(gold, "the calibration suits them, and not the corpus")
    answers = answers_for(spec, snapshot, gold.by, gold.keys, [part.name for part in task.parts])
    files = []
    for part in task.parts:
        calibration, hashes = _fitted(spec, part, options.method, gold, answers)
        source = {"snapshot": snapshot.number, **source_texts(gold_hash(gold, part.name), hashes)}
        files.append(CalibrationFile(part.name, calibration, fp, source, len(hashes)))
    return files


def _task(spec: JobSpec, options: CalibrateOptions) -> TaskSpec:
    """The task to calibrate; SpecError if it is unknown, or `--gold` does not fit the method."""
    problems = []
    if (options.method == "batch") != (options.gold is None):
        fix = "temperature and isotonic need --gold, batch does not: add --gold or take it out"
        problems.append(Problem(Option("gold"), fix, options.gold))
    tasks = [task for task in spec.tasks if task.name == options.task]
    if not tasks:
        fix = f"the spec has no such task; it has {', '.join(task.name for task in spec.tasks)}"
        problems.append(Problem(Option("task"), fix, options.task))
    if problems:
        raise SpecError(problems)
    return tasks[0]


def _snapshot(spec: JobSpec, store: Store, options: CalibrateOptions, cache_dir: Path) -> Contents:
    """The snapshot of that number, or the newest, with raw answers to the spec's question."""
    # — the file of the spec's calibration may not exist yet
    bare = [task.model_copy(update={"calibration": None}) for task in spec.tasks]
    jobs = jobs_for_each_dtype(spec.model_copy(update={"tasks": tuple(bare)}), cache_dir)
    raw = {job.fingerprints[options.task].raw.id for job in jobs}
    numbers = snapshot_numbers(store) if options.snapshot is None else [options.snapshot]
    for number in numbers:
        snapshot = contents(store, number)
        task = snapshot.tasks.get(options.task)
        if options.snapshot is None and snapshot.spec != spec.name:
            continue
        if task is not None and stored_version(store, options.task, task.fp).raw.id in raw:
            return snapshot
    fix = (
        f"{store.url} has no answers to the question that task {options.task!r} has now; take its "
        f"calibration out of the spec and run `assay run` first"
    )
    raise option_error("snapshot", fix, options.snapshot)


def _batch(spec: JobSpec, task: TaskSpec, snapshot: Contents) -> list[tuple[Calibration, int]]:
    """Batch calibration of each part, with the number of documents that have an answer.

    The answers are read in batches.
    """
    dataset = open_labels(
        spec.output, [task.name], snapshot=snapshot.number, storage_options=spec.storage_options
    )
    totals = [np.zeros(len(part.labels)) for part in task.parts]
    rows = [0] * len(totals)
    for batch in dataset.to_batches(columns=[task.name]):
        for number, part in enumerate(task.parts):
            p = part_probabilities(batch.column(task.name), RAW, part)  # [docs, labels]
            answered = p[~np.isnan(p).any(axis=1)]
            totals[number] += answered.sum(axis=0)
            rows[number] += len(answered)
    if not all(rows):
        raise option_error("task", "no document has an answer to this task", task.name)
    return [
        (Calibration("batch", tuple(part.labels), mean_prior((total / of_part)[None])), of_part)
        for part, total, of_part in zip(task.parts, totals, rows, strict=True)
    ]


def _fitted(
    spec: JobSpec, task: TaskSpec, method: str, gold: Gold, answers: GoldAnswers
) -> tuple[Calibration, list[str]]:
    """A calibration by gold labels, and the content hashes of the documents that it is fitted to.

    The rows of a sample of `assay audit` count by their weights in the corpus.
    """
    truth = gold.tasks[task.name].truth  # [rows]
    p = answers.tasks[task.name].p[RAW]  # [rows, labels]
    usable = (truth != UNLABELLED) & ~np.isnan(p).any(axis=1)
    seen = usable & np.isin(answers.hashes, list(readout_texts(spec, task)))
    usable &= ~seen
    if usable.sum() < (LEAST_ROWS if seen.any() else 1):
        fix = f"{usable.sum():,} of its {gold.rows:,} rows have a label and an answer in the output"
        if seen.any():
            fix += f", beside {seen.sum():,} that the readout has seen; {LEAST_ROWS} are needed"
        raise option_error("gold", fix, gold.source)
    rows = np.flatnonzero(usable)
    sampling = sampling_of(gold, answers, rows)
    weights = np.ones(len(rows)) if sampling is None else sampling.weights
    p, truth, labels = p[rows], truth[rows], tuple(task.labels)
    hashes: list[str] = answers.hashes[rows].tolist()
    if method == "temperature":
        return Calibration(method, labels, fit_temperature(p, truth, weights)), hashes
    absent = [label for index, label in enumerate(labels) if index not in truth]
    if absent:
        fix = (
            f"no gold row of {task.name} has these labels, so isotonic curves would never predict "
        )
        fix += "them; add some"
        raise option_error("gold", fix, absent)
    return Calibration(method, labels, fit_isotonic(p, truth, weights)), hashes


def fit_temperature(
    p: Floats,  # [docs, labels]
    truth: Ints,  # [docs]
    weights: Floats,  # [docs]
) -> Temperature:
    """The temperature with the smallest negative log-likelihood (Guo et al. 2017).

    The likelihood has one maximum, because its logarithm is concave in 1 / temperature.
    """
    logits, targets = log_p(p), np.eye(p.shape[1])[truth]
    limits = math.log(LOWEST_TEMPERATURE), math.log(HIGHEST_TEMPERATURE)
    best = minimize_scalar(
        lambda x: np.average(log_losses(logits / math.exp(x), targets), weights=weights),
        bounds=limits,
        options={"xatol": 1e-8},
    )
    return Temperature(math.exp(best.x))


def fit_isotonic(
    p: Floats,  # [docs, labels]
    truth: Ints,  # [docs]
    weights: Floats,  # [docs]
) -> Isotonic:
    """A rising curve for each label against all others (Zadrozny & Elkan 2002)."""
    _docs, labels = p.shape
    curves = []
    for label in range(labels - curves_for(labels), labels):
        regression = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        is_label = (truth == label).astype(np.float64)
        regression.fit(p[:, label].astype(np.float64), is_label, sample_weight=weights)
        knots = regression.X_thresholds_, regression.y_thresholds_
        curves.append(Curve(tuple(map(float, knots[0])), tuple(map(float, knots[1]))))
    return Isotonic(tuple(curves))
