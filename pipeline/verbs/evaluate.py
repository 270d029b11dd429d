"""Measures the answers of an output against gold labels. Entry point: `evaluate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import Option, Problem, SpecError, option_error
from pipeline.evaluation.gates import PLACE, Decision, Gate, decide, parse_gate
from pipeline.evaluation.intervals import Figure
from pipeline.evaluation.metrics import Scores, score
from pipeline.evaluation.multi import LabelRows, multi_figures
from pipeline.evaluation.operating_points import Threshold, choose_threshold, find_label_issues
from pipeline.gold.answers import GoldAnswers, answers_for, matching_snapshot
from pipeline.gold.audits import Audit, read_audit
from pipeline.gold.fitted_texts import LEAST_ROWS, fitted_texts
from pipeline.gold.labels import RANDOM, Gold, read_gold
from pipeline.gold.values import UNLABELLED
from pipeline.ledger.dataset import LabelDataset
from pipeline.ledger.snapshots import Contents, last_contents
from pipeline.options import MOST_RESAMPLES, EvalOptions, GoldOptions
from pipeline.spec.labels import task_of
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec
from pipeline.stores.store import open_store
from pipeline.verbs.audit import FilterQuality, judge_filter


@dataclass(frozen=True, slots=True)
class Cut:
    """The threshold of a label for a minimum precision or recall; None if none reaches it."""

    label: str
    metric: Literal["precision", "recall"]
    least: float
    threshold: Threshold | None


@dataclass(frozen=True, slots=True)
class Judged:
    """The scores of a task's answers, and the rows that they are of."""

    scores: Scores
    cuts: tuple[Cut, ...]
    gold_rows: NDArray[np.int64]  # [evaluated]: the documents, as rows of the gold
    truth: NDArray[np.int64]  # [evaluated]
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
    fitted: int  # with a text that the answers were fitted to
    evaluated: int  # the others; not judged if there are fewer than LEAST_ROWS beside fitted ones


@dataclass(frozen=True, slots=True)
class TaskEvaluation:
    """The scores of one task's answers, or of those about one label of a task of kind `multi`."""

    task: str
    labels: tuple[str, ...]
    rows: RowCounts
    judged: Judged | None  # None: too few rows are left
    label_issues: tuple[LabelIssue, ...]

    @property
    def at_chance(self) -> bool:
        """Whether the interval of AUROC (one against the rest) includes .5; False without one."""
        if self.judged is None:
            return False
        auroc = self.judged.scores.headlines["auroc"]
        if auroc.low is None or auroc.high is None:
            return False
        return auroc.low <= 0.5 <= auroc.high

    @property
    def swapped(self) -> bool:
        """Whether the interval of AUROC is below .5, as where labels have each other's names."""
        if self.judged is None:
            return False
        auroc = self.judged.scores.headlines["auroc"]
        return auroc.high is not None and auroc.high < 0.5


@dataclass(frozen=True, slots=True)
class MultiEvaluation:
    """The scores of a task of kind `multi` as a whole. Each label also is a `TaskEvaluation`."""

    task: str
    labels: tuple[str, ...]  # that have gold
    figures: Mapping[str, Figure]  # MULTI_HEADLINES; {} if no label is judged


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
    tasks: tuple[TaskEvaluation, ...]  # a task of kind `multi` is one for each label with gold
    without_gold: tuple[str, ...]  # tasks, and labels of tasks of kind `multi`: TASK.LABEL
    decisions: tuple[Decision, ...]
    labelled_at: str  # ISO 8601; "" if the snapshot is not published
    limit: str | None = None  # the condition of the run that made the snapshot
    multi: tuple[MultiEvaluation, ...] = ()
    filter: FilterQuality | None = None  # by the labels of an audit, which are of no task

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
    """Scores the spec's answers against the gold labels at `source`, or its filter by an audit.

    The answers are those of `candidate`, an unpublished snapshot, or else of the newest snapshot
    that was labelled with the spec's questions and model. SpecError if an option, a gate or the
    gold is wrong, if there is no such snapshot, or if it has no document of the gold.
    """
    _check_options(options)
    if candidate is None and not options.gates and (audit := read_audit(source, spec)) is not None:
        return _evaluate_filter(spec, source, audit, cache_dir)
    gold = read_gold(source, spec, gold_options)
    gates = parse_gates(options.gates, gold, spec)
    store = open_store(spec.output, spec.storage_options)
    if candidate is not None:
        snapshot, newest = candidate, candidate.number
    else:
        snapshot, newest = matching_snapshot(spec, store, list(gold.tasks), cache_dir)
    answers = answers_for(spec, snapshot, gold.by, gold.keys, gold.tasks)
    if candidate is None and not answers.in_corpus.any():
        raise _not_in_corpus(gold, LabelDataset(store, snapshot, ()))
    tasks = tuple(
        _evaluate_task(part, gold, answers, options, fitted_texts(spec, part))
        for part in spec.parts
        if part.name in gold.tasks
    )
    multi = tuple(
        _evaluate_multi(task, tasks, gold, answers, options)
        for task in spec.tasks
        if task.kind == "multi" and any(part.name in gold.tasks for part in task.parts)
    )
    return Evaluation(
        spec=spec.name,
        output=store.url,
        snapshot=snapshot.number,
        newest_snapshot=newest,
        corpus_rows=snapshot.rows,
        gold=gold,
        in_corpus=int(answers.in_corpus.sum()),
        repeated_in_corpus=int(np.maximum(answers.documents - 1, 0).sum()),
        tasks=tasks,
        multi=multi,
        without_gold=tuple(_without_gold(spec, gold)),
        decisions=tuple(_decide(gate, tasks, multi) for gate in gates),
        labelled_at=snapshot.created_at,
        limit=snapshot.limit,
    )


def _evaluate_filter(spec: JobSpec, source: str, audit: Audit, cache_dir: Path) -> Evaluation:
    """The quality of the filter alone, on the last snapshot."""
    store = open_store(spec.output, spec.storage_options)
    snapshot = last_contents(store, spec.name)
    quality = judge_filter(spec, audit, source, cache_dir=cache_dir)
    gold = Gold(source, "content_hash", tuple(audit.drops), {}, None, repeated=audit.repeated)
    return Evaluation(
        spec=spec.name,
        output=store.url,
        snapshot=snapshot.number,
        newest_snapshot=snapshot.number,
        corpus_rows=snapshot.rows,
        gold=replace(gold, outvoted=audit.outvoted, ties=audit.ties),
        in_corpus=quality.labels,
        repeated_in_corpus=0,
        tasks=(),
        without_gold=(),
        decisions=(),
        labelled_at=snapshot.created_at,
        limit=snapshot.limit,
        filter=quality,
    )


def _not_in_corpus(gold: Gold, corpus: LabelDataset) -> SpecError:
    """The error of gold without a document of the corpus, which shows an id of each."""
    ids = (id for batch in corpus.to_batches(columns=["doc_id"]) for id in batch["doc_id"])
    own, of_corpus = gold.keys[0], next((id.as_py() for id in ids), None)
    fix = f"no id is in the corpus: it has {own!r}, and the corpus has {of_corpus!r}"
    if gold.by != "doc_id":
        fix = f"no text is in the corpus, whose first document has the id {of_corpus!r}"
    fix += "; give gold of these documents, or name the column of their ids with --id"
    return option_error("gold", fix, gold.source)


def _check_options(options: EvalOptions) -> None:
    shares = {"precision": options.precision, "recall": options.recall}
    problems = [
        Problem(Option(name), "write a share above 0, up to 1", share)
        for name, share in shares.items()
        if share is not None and not 0 < share <= 1
    ]
    if not 1 <= options.resamples <= MOST_RESAMPLES:
        fix = f"write a whole number from 1 to {MOST_RESAMPLES}"
        problems.append(Problem(Option("resamples"), fix, options.resamples))
    if problems:
        raise SpecError(problems)


def parse_gates(written: Sequence[str], gold: Gold, spec: JobSpec) -> list[Gate]:
    """The gates; SpecError if one is malformed, or the gold does not judge its task.

    The gold has no labels for it, or has labels of documents that were not chosen at random.
    """
    tasks = {task.name: task for task in spec.tasks}
    gates = [parse_gate(text, tasks) for text in written]
    known = gold.tasks.keys() | set(map(task_of, gold.tasks))
    fix = f"{gold.source} has no labels for this task"
    problems = [Problem(PLACE, fix, gate.written) for gate in gates if gate.task not in known]
    problems += [
        Problem(
            PLACE,
            f"a review chose the documents of {gold.source} {gold.chosen_words(gate.task)}, so "
            f"they do not judge the corpus; give gold of a random sample: {RANDOM}",
            gate.written,
        )
        for gate in gates
        if any(task_of(n) == task_of(gate.task) and gold.kind(n) == "chosen" for n in gold.tasks)
    ]
    if problems:
        raise SpecError(problems)
    return gates


def _without_gold(spec: JobSpec, gold: Gold) -> Iterator[str]:
    """The tasks without gold, and of others the labels of kind `multi` without it."""
    for task in spec.tasks:
        absent = [part.name for part in task.parts if part.name not in gold.tasks]
        yield from [task.name] if len(absent) == len(task.parts) else absent


def _evaluate_multi(
    task: TaskSpec,
    parts: Sequence[TaskEvaluation],
    gold: Gold,
    answers: GoldAnswers,
    options: EvalOptions,
) -> MultiEvaluation:
    """The figures of all labels of the task that are judged."""
    own = [part for part in parts if task_of(part.task) == task.name]
    labels = tuple(part.task.removeprefix(f"{task.name}.") for part in own)
    judged = [part.judged for part in own if part.judged is not None]
    if not judged:
        return MultiEvaluation(task.name, labels, {})
    rows = np.unique(np.concatenate([of_label.gold_rows for of_label in judged]))
    figures = multi_figures(
        [LabelRows(np.searchsorted(rows, j.gold_rows), j.truth == 0, j.p[:, 0]) for j in judged],
        len(rows),
        resamples=options.resamples,
    )
    return MultiEvaluation(task.name, labels, figures)


def _evaluate_task(
    task: TaskSpec, gold: Gold, answers: GoldAnswers, options: EvalOptions, fitted: Set[str]
) -> TaskEvaluation:
    """Judges the answers on the rows with texts that they were not fitted to."""
    name = task.name
    of_gold, of_task = gold.tasks[name], answers.tasks[name]
    answered = ~np.isnan(of_task.p).any(axis=1)
    labelled = of_gold.truth != UNLABELLED
    usable = labelled & answers.in_corpus & answered
    unanswered = np.flatnonzero(labelled & answers.in_corpus & ~answered)
    seen = usable & np.isin(answers.hashes, list(fitted))
    rows = np.flatnonzero(usable & ~seen)
    judged = None
    if len(rows) >= (LEAST_ROWS if seen.any() else 1):
        judged = _judge(task, gold, rows, of_task.p[rows], options)
    evaluated = TaskEvaluation(
        task=name,
        labels=of_gold.labels,
        rows=RowCounts(
            gold=gold.rows,
            unlabelled=int((~labelled).sum()),
            not_in_corpus=int((labelled & ~answers.in_corpus).sum()),
            unanswered=dict(Counter(str(of_task.status[row]) for row in unanswered)),
            fitted=int(seen.sum()),
            evaluated=len(rows),
        ),
        judged=judged,
        label_issues=(),
    )
    # — answers at chance say nothing about the gold
    if judged is None or evaluated.at_chance or evaluated.swapped:
        return evaluated
    return replace(evaluated, label_issues=tuple(_issues(evaluated.labels, judged, gold, answers)))


def _judge(
    task: TaskSpec,
    gold: Gold,
    rows: NDArray[np.int64],  # [evaluated], of the gold
    p: NDArray[np.float64],  # [evaluated, labels]
    options: EvalOptions,
) -> Judged:
    """The scores of these rows."""
    truth, labels = gold.tasks[task.name].truth[rows], gold.tasks[task.name].labels
    minima: dict[Literal["precision", "recall"], float | None] = {
        "precision": options.precision,
        "recall": options.recall,
    }
    cuts = tuple(
        Cut(
            label,
            metric,
            least,
            choose_threshold(metric, least, truth == index, p[:, index]),
        )
        for index, label in enumerate(labels)
        for metric, least in minima.items()
        if least is not None
    )
    scores = score(truth, p, labels, values=task.values, resamples=options.resamples)
    return Judged(scores, cuts, rows, truth, p)


def _issues(
    labels: Sequence[str], judged: Judged, gold: Gold, answers: GoldAnswers
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
    gate: Gate, tasks: Sequence[TaskEvaluation], multi: Sequence[MultiEvaluation]
) -> Decision:
    """Whether the gate passes; it fails if nothing is judged."""
    whole = next((each for each in multi if each.task == gate.task), None)
    if whole is not None and whole.figures:
        return decide(gate, whole.figures, ())
    judged = next((task.judged for task in tasks if task.task == gate.task), None)
    if judged is None:
        return Decision(gate.written, None, False)
    return decide(gate, judged.scores.headlines, judged.scores.labels)
