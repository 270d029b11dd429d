"""Measures the answers of an output against gold labels. Entry point: `evaluate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import Problem, SpecError
from pipeline.evaluation.gates import PLACE, Decision, Gate, decide, parse_gate
from pipeline.evaluation.metrics import Scores, score
from pipeline.evaluation.thresholds import (
    Threshold,
    find_label_issues,
    for_precision,
    for_recall,
    operating_points,
)
from pipeline.gold.answers import GoldAnswers, answers_for, matching_snapshot
from pipeline.gold.labels import UNLABELLED, Gold, gold_hash, read_gold
from pipeline.ledger.snapshots import Contents
from pipeline.options import EvalOptions, GoldOptions
from pipeline.runtime.calibration_files import load_calibrations
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import open_store


@dataclass(frozen=True, slots=True)
class Cut:
    """The threshold of a label for a minimum precision or recall; None if no threshold has it."""

    label: str
    metric: str  # precision | recall
    least: float
    threshold: Threshold | None


@dataclass(frozen=True, slots=True)
class VersionScores:
    """The scores of one version of a task's probabilities: raw, or calibrated."""

    scores: Scores
    cuts: tuple[Cut, ...]
    p: NDArray[np.float64]  # [evaluated, labels]


@dataclass(frozen=True, slots=True)
class LabelIssue:
    """A gold row whose label is probably wrong."""

    doc_id: str
    gold: str  # label
    likely: str  # label
    p_gold: float
    p_likely: float
    text: str | None


@dataclass(frozen=True, slots=True)
class RowCounts:
    """What happened to a task's gold rows; the other counts add up to `gold`."""

    gold: int
    unlabelled: int  # without a gold label for this task
    not_in_corpus: int
    unanswered: Mapping[str, int]  # by status
    evaluated: int


@dataclass(frozen=True, slots=True)
class TaskEvaluation:
    """The scores of one task's answers."""

    task: str
    labels: tuple[str, ...]
    rows: RowCounts
    truth: NDArray[np.int64]  # [evaluated]
    versions: Mapping[str, VersionScores]  # raw, then calibrated if any; empty without rows
    label_issues: tuple[LabelIssue, ...]
    calibrated_on_gold: bool  # the calibration was fitted to these rows: its scores are too good
    gold_rows: NDArray[np.int64]  # [evaluated]: the documents, as rows of the gold

    @property
    def at_chance(self) -> bool:
        """Whether the interval of AUROC (one against the rest) includes .5; False without one."""
        if not self.versions:
            return False
        auroc = next(iter(self.versions.values())).scores.headlines["auroc"]
        if auroc.low is None or auroc.high is None:
            return False
        return auroc.low <= 0.5 <= auroc.high


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scores of an output's answers, and whether the gates pass."""

    spec: str
    output: str
    snapshot: int
    newest_snapshot: int  # of this spec; its questions or model may differ from the spec's now
    corpus_rows: int
    gold: Gold
    in_corpus: int  # gold rows
    repeated_in_corpus: int
    tasks: tuple[TaskEvaluation, ...]
    without_gold: tuple[str, ...]  # tasks
    decisions: tuple[Decision, ...]
    model: str  # as the spec names it
    labelled_at: str  # ISO 8601; "" if the snapshot is not published
    slice: str | None = None  # the documents that the snapshot is limited to
    rule: str | None = None  # of `assay filter`, in the spec

    @property
    def passed(self) -> bool:
        return all(decision.passed for decision in self.decisions)


def evaluate(
    spec: JobSpec,
    source: str,
    gold_options: GoldOptions,
    options: EvalOptions,
    *,
    cache_dir: Path,
    candidate: Contents | None = None,
) -> Evaluation:
    """Scores the spec's answers against the gold labels at `source`.

    The answers are those of `candidate`, an unpublished snapshot, or else of the newest snapshot
    that was labelled with the spec's questions and model. SpecError if an option, a gate or the
    gold is wrong, or if there is no such snapshot.
    """
    _check_options(options)
    gold = read_gold(source, spec, gold_options)
    gates = parse_gates(options.gates, gold, spec)
    store = open_store(spec.output, spec.storage_options)
    if candidate is not None:
        snapshot, newest = candidate, candidate.number
    else:
        snapshot, newest = matching_snapshot(spec, store, list(gold.tasks), cache_dir)
    answers = answers_for(spec, snapshot, gold.by, gold.keys, gold.tasks)
    fitted_to = {name: file.source.get("gold") for name, file in load_calibrations(spec).items()}
    own = {name: fitted_to.get(name) == gold_hash(gold, name) for name in gold.tasks}
    tasks = tuple(_evaluate_task(n, gold, answers, options, own=own[n]) for n in gold.tasks)
    return Evaluation(
        spec=spec.name,
        output=store.url,
        snapshot=snapshot.number,
        newest_snapshot=newest,
        corpus_rows=snapshot.rows,
        gold=gold,
        in_corpus=sum(doc_id is not None for doc_id in answers.doc_ids),
        repeated_in_corpus=answers.repeated,
        tasks=tasks,
        without_gold=tuple(task.name for task in spec.tasks if task.name not in gold.tasks),
        decisions=tuple(_decide(gate, tasks) for gate in gates),
        model="@".join(filter(None, (spec.model.path, spec.model.revision))),
        labelled_at=snapshot.created_at,
        slice=None if snapshot.slice is None else str(snapshot.slice),
        rule=None if spec.filter is None else spec.filter.keep,
    )


def _check_options(options: EvalOptions) -> None:
    shares = {"--precision": options.precision, "--recall": options.recall}
    problems = [
        Problem(place, "write a share above 0, up to 1", share)
        for place, share in shares.items()
        if share is not None and not 0 < share <= 1
    ]
    if options.resamples < 1:
        problems.append(Problem("--resamples", "write 1 or more", options.resamples))
    if problems:
        raise SpecError(problems)


def parse_gates(written: Sequence[str], gold: Gold, spec: JobSpec) -> list[Gate]:
    """The gates; SpecError if one is malformed, or the gold has no labels for its task."""
    labels = {task.name: tuple(task.labels) for task in spec.tasks}
    gates = [parse_gate(each, labels) for each in written]
    fix = f"{gold.source} has no labels for this task"
    problems = [Problem(PLACE, fix, gate.written) for gate in gates if gate.task not in gold.tasks]
    if problems:
        raise SpecError(problems)
    return gates


def _evaluate_task(
    name: str, gold: Gold, answers: GoldAnswers, options: EvalOptions, *, own: bool
) -> TaskEvaluation:
    """`own`: the task's calibration was fitted to this gold."""
    gold_task, of_task = gold.tasks[name], answers.tasks[name]
    in_corpus = np.array([doc_id is not None for doc_id in answers.doc_ids])
    answered = np.all([~np.isnan(p).any(axis=1) for p in of_task.p.values()], axis=0)
    labelled = gold_task.truth != UNLABELLED
    rows = np.flatnonzero(labelled & in_corpus & answered)
    unanswered = np.flatnonzero(labelled & in_corpus & ~answered)
    counts = RowCounts(
        gold=gold.rows,
        unlabelled=int((~labelled).sum()),
        not_in_corpus=int((labelled & ~in_corpus).sum()),
        unanswered=dict(Counter(str(of_task.status[row]) for row in unanswered)),
        evaluated=len(rows),
    )
    truth = gold_task.truth[rows]
    versions = {
        version: _score_version(truth, p[rows], gold_task.labels, options)
        for version, p in of_task.p.items()
        if len(rows)
    }
    issues: tuple[LabelIssue, ...] = ()
    if versions:
        # — the last version is calibrated; but not if the calibration was fitted to these rows
        trusted = list(versions.values())[0 if own else -1]
        issues = tuple(
            LabelIssue(
                doc_id=str(answers.doc_ids[rows[row]]),
                gold=gold_task.labels[truth[row]],
                likely=gold_task.labels[label],
                p_gold=float(trusted.p[row, truth[row]]),
                p_likely=float(trusted.p[row, label]),
                text=None if gold.texts is None else gold.texts[rows[row]],
            )
            for row, label in zip(*find_label_issues(truth, trusted.p), strict=True)
        )
    task = TaskEvaluation(name, gold_task.labels, counts, truth, versions, issues, own, rows)
    # — answers at chance say nothing about the gold
    return replace(task, label_issues=()) if task.at_chance else task


def _score_version(
    truth: NDArray[np.int64],  # [rows]
    p: NDArray[np.float64],  # [rows, labels]
    labels: Sequence[str],
    options: EvalOptions,
) -> VersionScores:
    cuts = []
    for index, label in enumerate(labels):
        points = operating_points(truth == index, p[:, index])
        if (least := options.precision) is not None:
            cuts.append(Cut(label, "precision", least, for_precision(points, least)))
        if (least := options.recall) is not None:
            cuts.append(Cut(label, "recall", least, for_recall(points, least)))
    return VersionScores(score(truth, p, labels, resamples=options.resamples), tuple(cuts), p)


def _decide(gate: Gate, tasks: Sequence[TaskEvaluation]) -> Decision:
    task = next(task for task in tasks if task.task == gate.task)
    if not task.versions:
        return Decision(gate.written, None, False)
    if gate.version not in task.versions:
        fix = f"{gate.task} has no {gate.version} answers; it has {', '.join(task.versions)}"
        raise SpecError([Problem(PLACE, fix, gate.written)])
    return decide(gate, task.versions[gate.version].scores)
