"""An evaluation as tables for a terminal, and as JSON. The page shows the same `Grid`s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.evaluation.gates import Decision
from pipeline.evaluation.intervals import Figure
from pipeline.evaluation.metrics import BINS, HEADLINES, Scores
from pipeline.gold.fitted_texts import LEAST_ROWS
from pipeline.gold.labels import By, Gold, Kind
from pipeline.ledger.columns import RAW
from pipeline.report.console import Grid, Part, interval, number, printed, truncate, warnings
from pipeline.report.doubts import evaluation_doubts
from pipeline.sources.shards import fields_of
from pipeline.verbs.evaluate import (
    Cut,
    Evaluation,
    LabelIssue,
    RowCounts,
    TaskEvaluation,
    VersionScores,
)

SHOWN_ISSUES = 10
FITTED_BY = {RAW: "the readout or the cascade", "calibrated": "the calibration"}
_TEXT_CHARS = 400
WIDE_LABELS = 12  # a confusion matrix of more labels is too wide to be read
_NAMES = {
    "accuracy": "accuracy",
    "f1": "macro F1",
    "auroc": "AUROC",
    "ap": "average precision",
    "brier": "Brier",
    "ece": f"calibration error ({BINS} bins of equal mass)",
}


@printed
def show_evaluation(evaluation: Evaluation) -> Iterator[Part]:
    """Where answers and gold are from, each task's tables, and the gates."""
    yield [*sources(evaluation)]
    for task in evaluation.tasks:
        yield from ("", f"{task.task}: {row_counts(task)}")
        yield from score_grids(task)
        yield from warnings(evaluation_doubts(task, evaluation.gold))
        if task.versions:
            yield confusion_grid(task)
        if task.label_issues:
            yield issue_grid(task, SHOWN_ISSUES)
    for decision in evaluation.decisions:
        verdict = "passed" if decision.passed else "FAILED"
        yield f"{verdict}: {decision.gate} (it is {number(decision.value)})"


def sources(evaluation: Evaluation) -> Iterator[tuple[str, str]]:
    """Where the answers and the gold are from: names and values."""
    gold = evaluation.gold
    yield "output", f"{evaluation.output}, snapshot {evaluation.snapshot:08d} of {evaluation.spec}"
    if evaluation.slice is not None:
        yield "slice", f"the snapshot has these documents alone: {evaluation.slice}"
    if evaluation.newest_snapshot != evaluation.snapshot:
        newest = f"snapshot {evaluation.newest_snapshot:08d}"
        yield "not the newest", f"{newest} has other questions or another model than this spec"
    joined = "id" if gold.by == "doc_id" else "the text's hash"
    yield "gold", f"{gold.source}, {gold.rows:,} documents, joined by {joined}"
    for task in evaluation.tasks:
        yield f"gold of {task.task}", gold_words(gold, task.task)
    corpus = f"the corpus has {evaluation.corpus_rows:,} rows"
    yield "in the corpus", f"{evaluation.in_corpus:,} of them; {corpus}"
    if gold.repeated:
        yield "repeated", f"{gold.repeated:,} gold rows repeat another; each document counts once"
    if gold.contradictory:
        rows = f"{gold.contradictory:,} gold rows"
        yield "left out", f"{rows}, which give one document different labels"
    if evaluation.repeated_in_corpus:
        rows = f"{evaluation.repeated_in_corpus:,} corpus rows have the key of another row"
        yield "ambiguous", f"{rows}; the first one is evaluated"
    if evaluation.without_gold:
        yield "without gold", ", ".join(evaluation.without_gold)


def headline(task: TaskEvaluation, gold: Gold) -> str:
    """The main figures of a task in one line, and who gave the gold labels."""
    if not task.versions:
        return "nothing is judged"
    headlines = next(iter(task.versions.values())).scores.headlines
    figures = [f"accuracy {interval(headlines['accuracy'])}"]
    if headlines["auroc"].value is not None:
        figures.insert(0, f"AUROC {interval(headlines['auroc'])}")
    rows = f"on {task.rows.evaluated:,} documents, by {gold_words(gold, task.task)}"
    return ", ".join([*figures, rows])


def row_counts(task: TaskEvaluation) -> str:
    """How many rows were evaluated, and why the others were not."""
    rows = task.rows
    judged = rows.evaluated if task.versions else 0
    parts = [f"{judged:,} of {rows.gold:,} gold documents evaluated"]
    if rows.unlabelled:
        parts.append(f"{rows.unlabelled:,} without a gold label")
    if rows.not_in_corpus:
        parts.append(f"{rows.not_in_corpus:,} not in the corpus")
    parts += [f"{n:,} without an answer ({status})" for status, n in rows.unanswered.items()]
    if rows.fitted:
        parts.append(f"{rows.fitted:,} left out, because {FITTED_BY[RAW]} was fitted to them")
    for version, fitted in task.fitted.items():
        if version != RAW and fitted > rows.fitted:
            more = fitted - rows.fitted
            parts.append(
                f"{more:,} more left out of the {version} figures, because "
                f"{FITTED_BY[version]} was fitted to them"
            )
    if rows.evaluated and not task.versions:
        parts.append(f"{rows.evaluated:,} are too few to judge (of {LEAST_ROWS})")
    if task.represented is not None:
        parts.append(f"they represent {task.represented:.0%} of the texts of the sampled corpus")
    return ", ".join(parts)


def gold_words(gold: Gold, task: str) -> str:
    """Who gave the gold labels of a task."""
    return {
        "people": "labels that people gave",
        "sample": "labels that people gave to a random sample of the corpus",
        "scores": "scores of another classifier",
        "teacher": "answers of another model",
    }[gold.kind(task)]


def score_grids(task: TaskEvaluation) -> Iterator[Grid]:
    """The scores of a task: in all, then by label and by threshold; none without rows."""
    if not task.versions:
        return
    scores = [version.scores for version in task.versions.values()]
    yield Grid(
        f"{task.task}, with 95 % intervals",
        ("", *task.versions),
        [(_NAMES[n], *(interval(scored.headlines[n]) for scored in scores)) for n in HEADLINES],
    )
    for name, version in task.versions.items():
        which = f" ({name})" if len(task.versions) > 1 else ""
        yield _labels(version, which)
        if version.cuts:
            yield _cuts(version, which)


def _labels(version: VersionScores, which: str) -> Grid:
    return Grid(
        f"by label{which}",
        ("label", "precision", "recall", "F1", "AUROC", "AP", "gold", "predicted"),
        [
            (
                label.label,
                *(
                    interval(Figure(value, *label.intervals.get(name, (None, None))))
                    for name, value in (("precision", label.precision), ("recall", label.recall))
                ),
                *map(number, (label.f1, label.auroc, label.ap)),
                f"{label.support:,}",
                f"{label.predicted:,}",
            )
            for label in version.scores.labels
        ],
    )


def _cuts(version: VersionScores, which: str) -> Grid:
    rows = []
    for cut in version.cuts:
        figures = ["no threshold reaches this", "", "", ""]
        if at := cut.threshold:
            rounded = f"{at.threshold:.6g}"  # never up, because it may be copied into a rule
            least = rounded if float(rounded) <= at.threshold else repr(at.threshold)
            figures = [least, interval(at.precision), interval(at.recall), f"{at.flagged:,}"]
        rows.append((f"{cut.metric} {cut.least:g}", cut.label, *figures))
    return Grid(
        f"thresholds{which}: a document has the label if its p is at least the threshold; "
        "precision and recall of other documents, by cross-validation",
        ("minimum", "label", "threshold", "precision", "recall", "documents"),
        rows,
        texts=2,
    )


def confusion_grid(task: TaskEvaluation) -> Grid:
    """The confusion matrix, or the most frequent confusions if it is too wide to be read."""
    labels, counts = task.labels, next(iter(task.versions.values())).scores.confusion
    if len(labels) <= WIDE_LABELS:
        return Grid(
            "confusion: gold label by row, answer (raw) by column",
            ("gold", *labels),
            [(label, *map("{:,}".format, row)) for label, row in zip(labels, counts, strict=True)],
            wrap=True,
        )
    pairs = [
        (count, gold, answer)
        for gold, row in zip(labels, counts, strict=True)
        for answer, count in zip(labels, row, strict=True)
        if count and gold != answer
    ]
    most = sorted(pairs, key=lambda pair: -pair[0])[:WIDE_LABELS]
    return Grid(
        "the most frequent confusions (raw); --json has all",
        ("gold", "answer", "documents"),
        [(gold, answer, f"{count:,}") for count, gold, answer in most],
        texts=2,
    )


def issue_grid(task: TaskEvaluation, most: int, *, texts: bool = False) -> Grid:
    """The first `most` label issues, with the documents' texts if asked for and known."""
    shown = task.label_issues[:most]
    with_texts = texts and any(issue.text is not None for issue in shown)
    left_out = len(task.label_issues) - len(shown)
    rest = f"; {left_out:,} more in --json" if left_out else ""
    return Grid(
        f"gold labels that are probably wrong, the most probable first{rest}",
        ("document", "gold", "answer", *["text"] * with_texts, "p of gold", "p of answer"),
        [
            (
                issue.doc_id,
                issue.gold,
                issue.likely,
                *[truncate(issue.text or "", _TEXT_CHARS)] * with_texts,
                number(issue.p_gold),
                number(issue.p_likely),
            )
            for issue in shown
        ],
        texts=3 + with_texts,
    )


@dataclass(frozen=True, slots=True)
class GoldJson:
    """The gold labels of an evaluation."""

    source: str
    joined_by: By
    documents: int
    in_corpus: int
    repeated: int
    contradictory: int
    repeated_in_corpus: int


@dataclass(frozen=True, slots=True)
class VersionJson(Scores):
    """The scores of one version of a task's probabilities."""

    ece_bins: str
    thresholds: tuple[Cut, ...]


@dataclass(frozen=True, slots=True)
class TaskEvaluationJson:
    """The scores of one task's answers, with every label issue."""

    labels: tuple[str, ...]
    rows: RowCounts
    versions: Mapping[str, VersionJson]
    gold: Kind
    fitted: Mapping[str, int]
    represented: float | None
    at_chance: bool
    swapped: bool
    mislabelled: tuple[LabelIssue, ...]


@dataclass(frozen=True, slots=True)
class EvaluationJson:
    """An evaluation, for other programs."""

    spec: str
    output: str
    snapshot: int
    newest_snapshot: int
    slice: str | None
    corpus_rows: int
    gold: GoldJson
    tasks: Mapping[str, TaskEvaluationJson]
    without_gold: tuple[str, ...]  # tasks
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
        slice=evaluation.slice,
        corpus_rows=evaluation.corpus_rows,
        gold=GoldJson(
            source=gold.source,
            joined_by=gold.by,
            documents=gold.rows,
            in_corpus=evaluation.in_corpus,
            repeated=gold.repeated,
            contradictory=gold.contradictory,
            repeated_in_corpus=evaluation.repeated_in_corpus,
        ),
        tasks={task.task: _task_json(task, gold) for task in evaluation.tasks},
        without_gold=evaluation.without_gold,
        gates=evaluation.decisions,
        passed=evaluation.passed,
    )


def _task_json(task: TaskEvaluation, gold: Gold) -> TaskEvaluationJson:
    bins = f"{BINS}, equal mass"
    return TaskEvaluationJson(
        labels=task.labels,
        rows=task.rows,
        versions={
            name: VersionJson(**fields_of(version.scores), ece_bins=bins, thresholds=version.cuts)
            for name, version in task.versions.items()
        },
        gold=gold.kind(task.task),
        fitted=task.fitted,
        represented=task.represented,
        at_chance=task.at_chance,
        swapped=task.swapped,
        mislabelled=task.label_issues,
    )
