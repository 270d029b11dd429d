"""Measures the answers of an output against gold labels. Entry point: `evaluate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import computed_field

from pipeline.errors import option_error
from pipeline.evaluation.gates import Decision, Gate, decide, parse_gate
from pipeline.evaluation.intervals import Figure
from pipeline.evaluation.metrics import LabelRows, Scores, means_over_labels, score
from pipeline.evaluation.operating_points import Threshold, choose_threshold, find_label_issues
from pipeline.gold.answers import (
    GoldAnswers,
    JudgedRows,
    RowCounts,
    answers_for,
    judged_rows,
    matching_snapshot,
)
from pipeline.gold.audits import Audit, read_audit
from pipeline.gold.fitted_texts import LEAST_ROWS, cross_validated
from pipeline.gold.labels import RANDOM, Gold, GoldCounts, Kind, is_asked, read_gold
from pipeline.ledger.dataset import LabelDataset
from pipeline.ledger.snapshots import Contents, last_contents
from pipeline.options import EvalOptions
from pipeline.spec.labels import task_of
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.store import open_store
from pipeline.verbs import ForPeople
from pipeline.verbs.against import Against, compared
from pipeline.verbs.audit import FilterQuality, judge_filter

SHOWN_IDS = 2


@dataclass(frozen=True, slots=True)
class Cut:
    """The threshold of a label for a minimum precision or recall; None if none reaches it."""

    label: str
    metric: Literal["precision", "recall"]
    least: float
    threshold: Threshold | None


@dataclass(frozen=True, slots=True)
class LabelIssue:
    """A gold row whose label is probably wrong."""

    doc_id: str
    gold: str  # label
    likely: str  # label
    p_gold: float
    p_likely: float
    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEvaluation:
    """The scores of one task's answers, or of those about one label of a task of kind `multi`."""

    task: str
    labels: tuple[str, ...]
    rows: RowCounts
    gold: Kind
    chosen: str = ""  # that a review chose the documents, and why; "" if it did not
    scores: Scores | None = None  # None: too few rows are left
    # Without scores: what the fit of its readout measured, if it has one.
    cross_validated: Mapping[str, Figure] = field(default_factory=dict)
    thresholds: tuple[Cut, ...] = ()
    mislabelled: tuple[LabelIssue, ...] = ()
    judged: ForPeople[JudgedRows | None] = None

    @property
    def auroc(self) -> Figure:
        return self.scores.headlines["auroc"] if self.scores else Figure(None, None, None)

    @computed_field
    @property
    def at_chance(self) -> bool:
        """Whether the interval of AUROC (one against the rest) includes .5; False without one."""
        low, high = self.auroc.low, self.auroc.high
        return low is not None and high is not None and low <= 0.5 <= high

    @computed_field
    @property
    def swapped(self) -> bool:
        """Whether the interval of AUROC is below .5, as if two labels were swapped."""
        return self.auroc.high is not None and self.auroc.high < 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The scores of an output's answers, and whether the gates pass. Also the JSON form."""

    spec: str
    output: str
    snapshot: int
    newest_snapshot: int  # of this spec; its questions or model may differ from the spec's now
    labelled_at: str  # ISO 8601; "" if the snapshot is not published
    limit: str | None = None  # the condition of the run that made the snapshot
    corpus_rows: int
    gold: GoldCounts
    in_corpus: int  # gold documents
    repeated_in_corpus: int
    tasks: Mapping[str, TaskEvaluation]  # of kind `multi` one for each label with gold: TASK.LABEL
    # MULTI_HEADLINES by task of kind `multi`: means over its labels; {} if no label is judged
    multi: Mapping[str, Mapping[str, Figure]]
    without_gold: tuple[str, ...]  # tasks, and labels of tasks of kind `multi`: TASK.LABEL
    gates: tuple[Decision, ...] = ()
    filter: FilterQuality | None = None  # by an audit, whose labels are of no task
    against: Against | None = None
    # The first ids of both, where no document of the gold is in the corpus.
    gold_ids: tuple[str, ...] = ()
    corpus_ids: tuple[str, ...] = ()

    @computed_field
    @property
    def is_judged(self) -> bool:
        """Whether the gold judges any answers, or the filter."""
        if self.filter is not None:
            return self.filter.lacks is None
        return any(task.scores for task in self.tasks.values())

    @computed_field
    @property
    def passed(self) -> bool:
        return all(decision.passed for decision in self.gates)


def evaluate(
    spec: JobSpec, options: EvalOptions, *, cache_dir: Path, candidate: Contents | None = None
) -> Evaluation:
    """Scores the spec's answers against gold labels, and decides the gates of `publish`.

    The answers are those of `candidate`, an unpublished snapshot, or else of the newest snapshot
    that was labelled with the spec's questions and model. With `options.tasks`, only their gates
    are decided. With `options.against`, the answers of another spec to the same rows are compared.
    SpecError if an option, a gate or the gold is wrong, or if there is no such snapshot.
    """
    source = options.gold or spec.gold.path
    if candidate is None and source and (audit := read_audit(source, spec)) is not None:
        if options.against:
            fix = "compares answers of tasks, and this gold judges the filter; leave it out"
            raise option_error("against", fix, options.against)
        return _evaluate_filter(spec, source, audit, cache_dir)
    gates = [gate for gate in parse_gates(spec) if is_asked(gate.task, options.tasks)]
    gold = read_gold(options.gold, spec, options.tasks)
    store = open_store(spec.output, spec.storage_options)
    if candidate is not None:
        snapshot, newest = candidate, candidate.number
    else:
        snapshot, newest = matching_snapshot(spec, store, list(gold.tasks), cache_dir)
    answers = answers_for(spec, snapshot, gold.counts.joined_by, gold.keys, gold.tasks)
    in_corpus = int(answers.in_corpus.sum())
    tasks = {
        part.name: _evaluate_task(spec, part, gold, answers, options)
        for part in spec.parts
        if part.name in gold.tasks
    }
    batches = LabelDataset(store, snapshot, ()).to_batches(columns=["doc_id"])
    ids = (id.as_py() for batch in batches for id in batch["doc_id"])
    judged = {name: of.judged for name, of in tasks.items() if of.judged is not None}
    multi = {
        task.name: _means_over_labels(task, judged)
        for task in spec.tasks
        if task.kind == "multi" and any(part.name in gold.tasks for part in task.parts)
    }
    return Evaluation(
        spec=spec.name,
        output=store.url,
        snapshot=snapshot.number,
        newest_snapshot=newest,
        labelled_at=snapshot.created_at,
        limit=snapshot.limit,
        corpus_rows=snapshot.rows,
        gold=gold.counts,
        in_corpus=in_corpus,
        repeated_in_corpus=int(np.maximum(answers.documents - 1, 0).sum()),
        tasks=tasks,
        multi=multi,
        without_gold=tuple(_without_gold(spec, gold, options.tasks)),
        gates=tuple(_decide(gate, gold, tasks, multi) for gate in gates),
        against=None
        if options.against is None or not judged
        else compared(options.against, gold, judged, cache_dir),
        gold_ids=() if in_corpus else gold.keys[:SHOWN_IDS],
        corpus_ids=() if in_corpus else tuple(islice(ids, SHOWN_IDS)),
    )


def _evaluate_filter(spec: JobSpec, source: str, audit: Audit, cache_dir: Path) -> Evaluation:
    """The quality of the filter alone, on the last snapshot."""
    store = open_store(spec.output, spec.storage_options)
    snapshot = last_contents(store, spec.name)
    quality = judge_filter(spec, audit, source, cache_dir=cache_dir)
    return Evaluation(
        spec=spec.name,
        output=store.url,
        snapshot=snapshot.number,
        newest_snapshot=snapshot.number,
        labelled_at=snapshot.created_at,
        limit=snapshot.limit,
        corpus_rows=snapshot.rows,
        gold=audit.counts,
        in_corpus=quality.labels,
        repeated_in_corpus=0,
        tasks={},
        multi={},
        without_gold=(),
        filter=quality,
    )


def parse_gates(spec: JobSpec) -> list[Gate]:
    """The gates of `publish`; SpecError if one is malformed."""
    tasks, written = {task.name: task for task in spec.tasks}, enumerate(spec.publish.gates)
    return [parse_gate(gate, tasks, f"publish.gates.{number}") for number, gate in written]


def why_not_judged(gate: Gate, gold: Gold) -> str | None:
    """Why the gold does not judge the task of a gate; None if it does."""
    if not any(gate.task in (name, task_of(name)) for name in gold.tasks):
        return f"{gold.source} has no labels for {gate.task}"
    if chosen := gold.chosen_words(gate.task):
        return f"{chosen}, so they do not judge the corpus; give gold of a random sample: {RANDOM}"
    return None


def _without_gold(spec: JobSpec, gold: Gold, asked: Sequence[str]) -> Iterator[str]:
    """The tasks without gold that are asked for, and of others the labels of kind `multi`."""
    for task in spec.tasks:
        own = [part.name for part in task.parts if is_asked(part.name, asked)]
        absent = [name for name in own if name not in gold.tasks]
        yield from [task.name] if absent and len(absent) == len(task.parts) else absent


def _means_over_labels(task: TaskSpec, judged: Mapping[str, JudgedRows]) -> Mapping[str, Figure]:
    """The figures of all labels of the task that are judged."""
    own = [judged[part.name] for part in task.parts if part.name in judged]
    if not own:
        return {}
    rows = np.unique(np.concatenate([of_label.gold_rows for of_label in own]))
    return means_over_labels(
        [LabelRows(np.searchsorted(rows, j.gold_rows), j.truth == 0, j.p[:, 0]) for j in own],
        len(rows),
    )


def _evaluate_task(
    spec: JobSpec, task: TaskSpec, gold: Gold, answers: GoldAnswers, options: EvalOptions
) -> TaskEvaluation:
    """Judges the answers on the rows with texts that they were not fitted to."""
    name = task.name
    counts, judged = judged_rows(spec, task, gold, answers)
    evaluated = TaskEvaluation(
        task=name,
        labels=gold.tasks[name].labels,
        rows=counts,
        gold=gold.kind(name),
        chosen=gold.chosen_words(name),
    )
    if counts.evaluated < (LEAST_ROWS if counts.fitted else 1):
        return replace(evaluated, cross_validated=cross_validated(spec, task))
    labels = evaluated.labels
    scored = replace(
        evaluated,
        judged=judged,
        thresholds=tuple(_thresholds(labels, judged, options)),
        scores=score(judged.truth, judged.p, labels, values=task.values),
    )
    # — answers at chance cannot show errors of the gold
    if scored.at_chance or scored.swapped:
        return scored
    return replace(scored, mislabelled=tuple(_issues(labels, judged, gold, answers)))


def _thresholds(labels: Sequence[str], judged: JudgedRows, options: EvalOptions) -> Iterator[Cut]:
    """The threshold of each label for each minimum that is asked for."""
    minima: dict[Literal["precision", "recall"], float | None] = {
        "precision": options.precision,
        "recall": options.recall,
    }
    for index, label in enumerate(labels):
        rows = judged.truth == index, judged.p[:, index]
        for metric, least in minima.items():
            if least is not None:
                yield Cut(label, metric, least, choose_threshold(metric, least, *rows))


def _issues(
    labels: Sequence[str], judged: JudgedRows, gold: Gold, answers: GoldAnswers
) -> Iterator[LabelIssue]:
    """The gold rows whose label is probably wrong."""
    rows, truth, p = judged.gold_rows, judged.truth, judged.p
    for row, label in zip(*find_label_issues(truth, p), strict=True):
        yield LabelIssue(
            doc_id=str(answers.doc_ids[rows[row]]),
            gold=labels[truth[row]],
            likely=labels[label],
            p_gold=float(p[row, truth[row]]),
            p_likely=float(p[row, label]),
            text=None if gold.texts is None else gold.texts[rows[row]],
        )


def _decide(
    gate: Gate,
    gold: Gold,
    tasks: Mapping[str, TaskEvaluation],
    multi: Mapping[str, Mapping[str, Figure]],
) -> Decision:
    """Whether the gate passes; it fails if nothing is judged."""
    if reason := why_not_judged(gate, gold):
        return Decision(gate.written, None, False, reason)
    if figures := multi.get(gate.task):
        return decide(gate, figures, ())
    scores = tasks[gate.task].scores if gate.task in tasks else None
    if scores is None:
        return Decision(gate.written, None, False)
    return decide(gate, scores.headlines, scores.labels)
