"""Make a task's calibration file of its answers in the output, and of gold labels.

Knows how to put answers, gold and fits together in this process. Knows nothing of the model, of
Ray, or of how a calibration is applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import Problem, SpecError
from pipeline.evaluation.calibration_fitting import fit_isotonic, fit_temperature
from pipeline.fitted.calibration import Calibration, Probabilities, mean_prior
from pipeline.gold.answers import answers_for
from pipeline.gold.labels import UNLABELLED, gold_hash, read_gold
from pipeline.ledger.columns import RAW, probabilities
from pipeline.ledger.contents import Contents, contents
from pipeline.ledger.dataset import open_labels
from pipeline.ledger.snapshots import snapshot_numbers
from pipeline.options import CalibrateOptions, GoldOptions
from pipeline.runtime.calibrations import CalibrationFile, raw_fingerprint, write_calibration
from pipeline.runtime.fitted_files import options_for
from pipeline.runtime.job import jobs_for_each_dtype
from pipeline.spec.schema import JobSpec, TaskSpec
from pipeline.stores.store import Store, open_store


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A calibration, and the file that it was written to."""

    path: str
    file: CalibrationFile


def calibrate(spec: JobSpec, options: CalibrateOptions, to: str, *, cache_dir: Path) -> Calibrated:
    """Writes the file; the same answers, and the same gold, give the same bytes."""
    task = _task(spec, options)
    store = open_store(spec.output, spec.storage_options)
    found = _snapshot(spec, store, options, cache_dir)
    source: dict[str, object] = {"snapshot": found.number}
    if options.gold is None:
        calibration, rows = _batch(spec, task, found)
    else:
        p, right, source["gold"] = _gold_rows(spec, task, options.gold, found)
        calibration, rows = _fitted(task, options.method, p, right), len(right)
    fingerprint = raw_fingerprint(store, task.name, found.tasks[task.name].fp)
    file = CalibrationFile(task.name, calibration, fingerprint, source, rows)
    write_calibration(to, file, options_for(to, spec))
    return Calibrated(to, file)


def _task(spec: JobSpec, options: CalibrateOptions) -> TaskSpec:
    """The task; SpecError if there is none, or the method has not what it takes."""
    problems = []
    if (options.method == "batch") != (options.gold is None):
        fix = "batch takes the corpus itself, without gold; temperature and isotonic are fitted to"
        problems.append(
            Problem("--gold", f"{fix} gold: name it, or another --method", options.gold)
        )
    found = [task for task in spec.tasks if task.name == options.task]
    if not found:
        names = ", ".join(task.name for task in spec.tasks)
        problems.append(
            Problem("--task", f"the spec has no such task; it has {names}", options.task)
        )
    if problems:
        raise SpecError(problems)
    return found[0]


def _snapshot(spec: JobSpec, store: Store, options: CalibrateOptions, cache_dir: Path) -> Contents:
    """The snapshot of that number, or the spec's last, whose raw answers are the spec's own."""
    raw = _raw_versions(spec, options.task, cache_dir)
    numbers = snapshot_numbers(store) if options.snapshot is None else [options.snapshot]
    for number in numbers:
        found = contents(store, number)
        task = found.tasks.get(options.task)
        if options.snapshot is None and found.spec != spec.name:
            continue
        if task is not None and raw_fingerprint(store, options.task, task.fp) in raw:
            return found
    fix = (
        f"{store.url} has no answers to task {options.task!r} as the spec asks it now; run "
        f"`assay run` first, with its calibration left out"
    )
    raise SpecError([Problem("--snapshot", fix, options.snapshot)])


def _raw_versions(spec: JobSpec, task: str, cache_dir: Path) -> set[str]:
    """The task's fingerprints without calibration: its file need not be there yet."""
    raw = tuple(each.model_copy(update={"calibration": None}) for each in spec.tasks)
    bare = spec.model_copy(update={"tasks": raw})
    return {job.fp[task] for job in jobs_for_each_dtype(bare, cache_dir)}


def _batch(spec: JobSpec, task: TaskSpec, found: Contents) -> tuple[Calibration, int]:
    """The mean answer about the corpus, and of how many documents it is; a batch is held."""
    dataset = open_labels(
        spec.output, [task.name], snapshot=found.number, storage_options=spec.storage_options
    )
    labels = tuple(task.labels)
    total, rows = np.zeros(len(labels)), 0
    for batch in dataset.to_batches(columns=[task.name]):
        p = probabilities(batch.column(task.name), RAW, labels)  # [docs, labels]
        answered = p[~np.isnan(p).any(axis=1)]
        total, rows = total + answered.sum(axis=0), rows + len(answered)
    if not rows:
        raise SpecError([Problem("--task", "no document has an answer to it", task.name)])
    return Calibration("batch", labels, mean_prior((total / rows)[None])), rows


def _gold_rows(
    spec: JobSpec, task: TaskSpec, source: str, found: Contents
) -> tuple[Probabilities, NDArray[np.int64], str]:
    """The raw answers about the gold's documents [rows, labels], the right labels, the gold's hash.

    The hash is of what the gold says for the task, in whatever format it is written.
    """
    gold = read_gold(source, spec, GoldOptions(tasks=(task.name,)))
    truth = gold.tasks[task.name].truth  # [rows]
    answered = answers_for(spec, found, found.number, gold.by, gold.keys, [task.name])
    p = answered.tasks[task.name].p[RAW]  # [rows, labels]
    usable = (truth != UNLABELLED) & ~np.isnan(p).any(axis=1)
    if not usable.any():
        fix = f"none of its {gold.rows:,} rows is labelled and has an answer in the output"
        raise SpecError([Problem("--gold", fix, source)])
    return p[usable], truth[usable], gold_hash(gold, task.name)


def _fitted(task: TaskSpec, method: str, p: Probabilities, right: NDArray[np.int64]) -> Calibration:
    labels = tuple(task.labels)
    if method == "temperature":
        return Calibration(method, labels, fit_temperature(p, right))
    absent = [label for index, label in enumerate(labels) if index not in right]
    if absent:
        fix = "no gold row has these labels, which isotonic curves would never give again; add some"
        raise SpecError([Problem("--gold", fix, absent)])
    return Calibration(method, labels, fit_isotonic(p, right))
