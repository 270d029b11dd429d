"""Judge an output's answers by gold labels.

Knows how to put gold, answers and figures together in this process. Knows nothing of the model, of
Ray, or of how figures are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import Problem, SpecError
from pipeline.evaluation.gates import PLACE, Decision, Gate, decide, parse_gate
from pipeline.evaluation.scores import Scores, score
from pipeline.evaluation.thresholds import (
    Threshold,
    for_precision,
    for_recall,
    mislabelled,
    operating_points,
)
from pipeline.gold.answers import GoldAnswers, answers_for, matching_snapshot
from pipeline.gold.labels import UNLABELLED, Gold, gold_hash, read_gold
from pipeline.ledger.contents import Contents
from pipeline.options import EvalOptions, GoldOptions
from pipeline.runtime.calibrations import load_calibrations
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import open_store


@dataclass(frozen=True, slots=True)
class Cut:
    """The threshold of a label for a wish; None where no threshold gives it."""

    label: str
    wish: str  # precision | recall
    wanted: float
    found: Threshold | None


@dataclass(frozen=True, slots=True)
class VersionScores:
    """One set of probabilities, judged."""

    scores: Scores
    cuts: tuple[Cut, ...]
    p: NDArray[np.float64]  # [evaluated, labels]


@dataclass(frozen=True, slots=True)
class LabelIssue:
    """A gold row that is likely mislabelled."""

    doc_id: str
    given: str
    likely: str
    p_given: float
    p_likely: float
    text: str | None


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Where a task's gold rows went; they add up to all."""

    gold: int
    unlabelled: int  # by the gold, for this task
    not_in_corpus: int
    unanswered: Mapping[str, int]  # by status
    evaluated: int


@dataclass(frozen=True, slots=True)
class TaskEvaluation:
    """One task's answers, judged."""

    task: str
    labels: tuple[str, ...]
    rows: RowCounts
    truth: NDArray[np.int64]  # [evaluated]
    versions: Mapping[
        str, VersionScores
    ]  # raw, and calibrated where there is such; none without rows
    label_issues: tuple[LabelIssue, ...]
    calibrated_on_gold: bool  # the calibration was fitted to these very rows: its figures flatter


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An output, judged by gold."""

    spec: str
    output: str
    snapshot: int
    newest_snapshot: int  # the spec's; another where that one asks otherwise than the spec
    corpus_rows: int
    gold: Gold
    in_corpus: int  # gold rows
    repeated_in_corpus: int
    tasks: tuple[TaskEvaluation, ...]
    without_gold: tuple[str, ...]  # tasks
    decisions: tuple[Decision, ...]

    @property
    def passed(self) -> bool:
        return all(decision.passed for decision in self.decisions)


def evaluate(
    spec: JobSpec,
    source: str,
    how: GoldOptions,
    options: EvalOptions,
    *,
    cache_dir: Path,
    candidate: Contents | None = None,
) -> Evaluation:
    """The spec's answers in its output against the gold at `source`.

    Those of the newest fitting snapshot, or of a candidate that is not published yet.
    """
    _check_options(options)
    gates = [
        parse_gate(g, {task.name: tuple(task.labels) for task in spec.tasks}) for g in options.gates
    ]
    gold = read_gold(source, spec, how)
    check_gates(gates, gold)
    store = open_store(spec.output, spec.storage_options)
    if candidate is not None:
        found, newest = candidate, candidate.number
    else:
        found, newest = matching_snapshot(spec, store, list(gold.tasks), cache_dir)
    answered = answers_for(spec, found, newest, gold.by, gold.keys, gold.tasks)
    sources = {name: file.source.get("gold") for name, file in load_calibrations(spec).items()}
    tasks = tuple(
        _judged(name, gold, answered, options, own=sources.get(name) == gold_hash(gold, name))
        for name in gold.tasks
    )
    return Evaluation(
        spec=spec.name,
        output=store.url,
        snapshot=answered.snapshot,
        newest_snapshot=answered.newest,
        corpus_rows=answered.corpus_rows,
        gold=gold,
        in_corpus=sum(doc_id is not None for doc_id in answered.doc_ids),
        repeated_in_corpus=answered.repeated,
        tasks=tasks,
        without_gold=tuple(task.name for task in spec.tasks if task.name not in gold.tasks),
        decisions=tuple(_decided(gate, tasks) for gate in gates),
    )


def _check_options(options: EvalOptions) -> None:
    shares = {"--precision": options.precision, "--recall": options.recall}
    problems = [
        Problem(place, "write a share above 0, up to 1", share)
        for place, share in shares.items()
        if share is not None and not 0 < share <= 1
    ]
    if options.resamples is not None and options.resamples < 1:
        problems.append(Problem("--resamples", "write 1 or more", options.resamples))
    if problems:
        raise SpecError(problems)


def check_gates(gates: Sequence[Gate], gold: Gold) -> None:
    """SpecError where a gate is of a task that the gold says nothing of."""
    fix = f"{gold.source} has no labels for this task"
    problems = [Problem(PLACE, fix, g.written) for g in gates if g.task not in gold.tasks]
    if problems:
        raise SpecError(problems)


def _judged(
    name: str, gold: Gold, answered: GoldAnswers, options: EvalOptions, *, own: bool
) -> TaskEvaluation:
    """`own`: the task's calibration was fitted to this gold."""
    said, answers = gold.tasks[name], answered.tasks[name]
    there = np.array([doc_id is not None for doc_id in answered.doc_ids])
    has_answer = np.all([~np.isnan(p).any(axis=1) for p in answers.p.values()], axis=0)
    labelled = said.truth != UNLABELLED
    rows = np.flatnonzero(labelled & there & has_answer)
    silent = np.flatnonzero(labelled & there & ~has_answer)
    counts = RowCounts(
        gold=gold.rows,
        unlabelled=int((~labelled).sum()),
        not_in_corpus=int((labelled & ~there).sum()),
        unanswered=dict(Counter(str(answers.status[row]) for row in silent)),
        evaluated=len(rows),
    )
    truth = said.truth[rows]
    versions = {
        version: _version(truth, p[rows], said.labels, options)
        for version, p in answers.p.items()
        if len(rows)
    }
    honest = dict(list(versions.items())[:1]) if own else versions
    label_issues = (
        _label_issues(truth, honest, said.labels, rows, gold, answered) if len(rows) else ()
    )
    return TaskEvaluation(name, said.labels, counts, truth, versions, label_issues, own)


def _version(
    truth: NDArray[np.int64],  # [rows]
    p: NDArray[np.float64],  # [rows, labels]
    labels: Sequence[str],
    options: EvalOptions,
) -> VersionScores:
    resamples = options.resamples
    cuts = []
    for index, label in enumerate(labels):
        points = operating_points(truth == index, p[:, index])
        if options.precision is not None:
            found = for_precision(points, options.precision)
            cuts.append(Cut(label, "precision", options.precision, found))
        if options.recall is not None:
            found = for_recall(points, options.recall)
            cuts.append(Cut(label, "recall", options.recall, found))
    return VersionScores(score(truth, p, labels, resamples=resamples), tuple(cuts), p)


def _label_issues(
    truth: NDArray[np.int64],  # [evaluated]
    versions: Mapping[str, VersionScores],
    labels: Sequence[str],
    rows: NDArray[np.int64],  # [evaluated]: the gold's
    gold: Gold,
    answered: GoldAnswers,
) -> tuple[LabelIssue, ...]:
    """By the probabilities that mean most, the last: the calibrated where there are any."""
    p = list(versions.values())[-1].p
    return tuple(
        LabelIssue(
            doc_id=str(answered.doc_ids[rows[each.row]]),
            given=labels[each.given],
            likely=labels[each.likely],
            p_given=each.p_given,
            p_likely=each.p_likely,
            text=None if gold.texts is None else gold.texts[rows[each.row]],
        )
        for each in mislabelled(truth, p)
    )


def _decided(gate: Gate, tasks: Sequence[TaskEvaluation]) -> Decision:
    task = next(task for task in tasks if task.task == gate.task)
    if not task.versions:
        return Decision(gate.written, None, False)
    if gate.version not in task.versions:
        fix = f"{gate.task} has no {gate.version} answers; it has {', '.join(task.versions)}"
        raise SpecError([Problem(PLACE, fix, gate.written)])
    return decide(gate, task.versions[gate.version].scores)
