"""An evaluation as JSON, for other programs. Entry point: `evaluation_json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.evaluation.gates import Decision
from pipeline.evaluation.intervals import Figure
from pipeline.evaluation.metrics import BINS, Scores
from pipeline.gold.labels import By, Gold, Kind
from pipeline.sources.shards import fields_of
from pipeline.verbs.audit import FilterQuality
from pipeline.verbs.evaluate import Cut, Evaluation, LabelIssue, RowCounts, TaskEvaluation


@dataclass(frozen=True, slots=True)
class GoldJson:
    """The gold labels of an evaluation."""

    source: str
    joined_by: By
    documents: int
    in_corpus: int
    repeated: int
    contradictory: int  # rows of `ties`
    outvoted: int  # documents with several labels, of which one was given most often
    ties: tuple[str, ...]  # documents that are left out
    repeated_in_corpus: int


@dataclass(frozen=True, slots=True)
class JudgedJson(Scores):
    """The scores of a task's answers."""

    ece_bins: str
    thresholds: tuple[Cut, ...]


@dataclass(frozen=True, slots=True)
class TaskEvaluationJson:
    """The scores of one task's answers, with every label issue."""

    labels: tuple[str, ...]
    rows: RowCounts
    scores: JudgedJson | None  # None: nothing is judged
    gold: Kind
    at_chance: bool
    swapped: bool
    mislabelled: tuple[LabelIssue, ...]


@dataclass(frozen=True, slots=True)
class MultiEvaluationJson:
    """The scores of a task of kind `multi` as a whole: means over its labels."""

    labels: tuple[str, ...]  # that have gold; each also is a task, TASK.LABEL
    figures: Mapping[str, Figure]


@dataclass(frozen=True, slots=True)
class EvaluationJson:
    """An evaluation, for other programs."""

    spec: str
    output: str
    snapshot: int
    newest_snapshot: int
    limit: str | None
    corpus_rows: int
    gold: GoldJson
    tasks: Mapping[str, TaskEvaluationJson]
    multi: Mapping[str, MultiEvaluationJson]
    filter: FilterQuality | None  # by an audit, whose labels are of no task
    without_gold: tuple[str, ...]  # tasks, and labels: TASK.LABEL
    gates: tuple[Decision, ...]
    passed: bool


def evaluation_json(evaluation: Evaluation) -> EvaluationJson:
    """The JSON form of an evaluation."""
    gold = evaluation.gold
    return EvaluationJson(
        spec=evaluation.spec,
        output=evaluation.output,
        snapshot=evaluation.snapshot,
        newest_snapshot=evaluation.newest_snapshot,
        limit=evaluation.limit,
        corpus_rows=evaluation.corpus_rows,
        gold=GoldJson(
            source=gold.source,
            joined_by=gold.by,
            documents=gold.rows,
            in_corpus=evaluation.in_corpus,
            repeated=gold.repeated,
            contradictory=gold.contradictory,
            outvoted=gold.outvoted,
            ties=gold.ties,
            repeated_in_corpus=evaluation.repeated_in_corpus,
        ),
        tasks={task.task: _task_json(task, gold) for task in evaluation.tasks},
        multi={of.task: MultiEvaluationJson(of.labels, of.figures) for of in evaluation.multi},
        filter=evaluation.filter,
        without_gold=evaluation.without_gold,
        gates=evaluation.decisions,
        passed=evaluation.passed,
    )


def _task_json(task: TaskEvaluation, gold: Gold) -> TaskEvaluationJson:
    bins, judged = f"{BINS}, equal mass", task.judged
    return TaskEvaluationJson(
        labels=task.labels,
        rows=task.rows,
        scores=None
        if judged is None
        else JudgedJson(**fields_of(judged.scores), ece_bins=bins, thresholds=judged.cuts),
        gold=gold.kind(task.task),
        at_chance=task.at_chance,
        swapped=task.swapped,
        mislabelled=task.label_issues,
    )
