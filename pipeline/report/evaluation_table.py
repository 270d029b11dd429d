"""An evaluation as tables for a terminal. The page shows the same `Grid`s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pipeline.evaluation.intervals import Figure
from pipeline.evaluation.metrics import BINS, LabelScore
from pipeline.evaluation.ordinal import ORDINAL_HEADLINES
from pipeline.gold.fitted_texts import LEAST_ROWS
from pipeline.gold.labels import Gold
from pipeline.report.audit import filter_facts, filter_grid
from pipeline.report.console import Grid, Part, interval, number, printed, truncate, warnings
from pipeline.report.doubts import evaluation_doubts, shared_doubts
from pipeline.spec.labels import YES, task_of
from pipeline.verbs.evaluate import (
    Cut,
    Evaluation,
    Judged,
    LabelIssue,
    MultiEvaluation,
    TaskEvaluation,
)

SHOWN_ISSUES = 10
FITTED_BY = "the readout or the cascade"
_TEXT_CHARS = 400
WIDE_LABELS = 12  # a confusion matrix of more labels is too wide to be read
_NAMES = {
    "accuracy": "accuracy",
    "f1": "macro F1",
    "auroc": "AUROC",
    "ap": "average precision",
    "brier": "Brier",
    "ece": f"calibration error ({BINS} bins of equal mass)",
    "qwk": "quadratic weighted kappa",
    "mae": "mean absolute error of the score",
    "spearman": "Spearman's rank correlation of the score",
    "macro_f1": "macro F1",
    "macro_auroc": "macro AUROC",
}


@printed
def show_evaluation(evaluation: Evaluation) -> Iterator[Part]:
    """Where answers and gold are from, each task's tables, and the gates."""
    yield [*sources(evaluation)]
    if evaluation.filter is not None:
        yield from ("", filter_grid(evaluation.filter), [*filter_facts(evaluation.filter)])
    for task in whole_tasks(evaluation):
        yield from ("", f"{task.task}: {row_counts(task)}")
        yield from score_grids(task)
        yield from warnings(evaluation_doubts(task, evaluation.gold))
        if task.judged is not None:
            yield confusion_grid(task.labels, task.judged)
        if task.label_issues:
            yield issue_grid(task.label_issues, SHOWN_ISSUES)
    for whole in evaluation.multi:
        parts = parts_of(evaluation, whole)
        yield from ("", *multi_row_counts(whole, parts))
        yield from multi_grids(whole, parts)
        yield from warnings(shared_doubts(parts, evaluation.gold))
        if issues := multi_issues(parts):
            yield issue_grid(issues, SHOWN_ISSUES)
    for decision in evaluation.decisions:
        verdict = "passed" if decision.passed else "FAILED"
        yield f"{verdict}: {decision.gate} (it is {number(decision.value)})"


def sources(evaluation: Evaluation) -> Iterator[tuple[str, str]]:
    """Where the answers and the gold are from: names and values."""
    gold = evaluation.gold
    yield "output", f"{evaluation.output}, snapshot {evaluation.snapshot:08d} of {evaluation.spec}"
    if evaluation.limit is not None:
        yield "limit", f"the snapshot has answers about these documents alone: {evaluation.limit}"
    if evaluation.newest_snapshot != evaluation.snapshot:
        newest = f"snapshot {evaluation.newest_snapshot:08d}"
        yield "not the newest", f"{newest} has other questions or another model than this spec"
    joined = "id" if gold.by == "doc_id" else "the text's hash"
    yield "gold", f"{gold.source}, {gold.rows:,} documents, joined by {joined}"
    words: dict[str, dict[str, str]] = {}  # by task, of its parts
    for task in evaluation.tasks:
        words.setdefault(task_of(task.task), {})[task.task] = gold_words(gold, task.task)
    for name, of_parts in words.items():
        one = len(set(of_parts.values())) == 1
        for part, giver in [(name, next(iter(of_parts.values())))] if one else of_parts.items():
            yield f"gold of {part}", giver
    corpus = f"the corpus has {evaluation.corpus_rows:,} rows"
    yield "in the corpus", f"{evaluation.in_corpus:,} of them; {corpus}"
    if gold.repeated:
        yield "repeated", f"{gold.repeated:,} gold rows repeat another; each document counts once"
    yield from gold.disagreements
    if evaluation.repeated_in_corpus:
        rows = f"{evaluation.repeated_in_corpus:,} corpus rows have the key of another row"
        yield "ambiguous", f"{rows}; the first one is evaluated"
    if evaluation.without_gold:
        yield "without gold", ", ".join(evaluation.without_gold)


def headline(task: TaskEvaluation, gold: Gold) -> str:
    """The main figures of a task in one line, and who gave the gold labels."""
    if task.judged is None:
        return "nothing is judged"
    headlines = task.judged.scores.headlines
    figures = [f"accuracy {interval(headlines['accuracy'])}"]
    figures[:0] = [
        f"{_NAMES[n]} {interval(headlines[n])}" for n in ORDINAL_HEADLINES if n in headlines
    ]
    if headlines["auroc"].value is not None:
        figures.insert(0, f"AUROC {interval(headlines['auroc'])}")
    rows = f"on {task.rows.evaluated:,} documents, by {gold_words(gold, task.task)}"
    return ", ".join([*figures, rows])


def multi_headline(whole: MultiEvaluation) -> str:
    """The main figures of a task of kind `multi` in one line."""
    if not whole.figures:
        return "nothing is judged"
    shown = (f"{_NAMES[name]} {interval(figure)}" for name, figure in whole.figures.items())
    return f"{', '.join(shown)}, of {len(whole.labels):,} labels"


def whole_tasks(evaluation: Evaluation) -> list[TaskEvaluation]:
    """The tasks that are not labels of tasks of kind `multi`."""
    return [task for task in evaluation.tasks if task_of(task.task) == task.task]


def parts_of(evaluation: Evaluation, whole: MultiEvaluation) -> list[TaskEvaluation]:
    """The evaluations of the labels of a task of kind `multi`, in the spec's order."""
    names = {f"{whole.task}.{label}" for label in whole.labels}
    return [task for task in evaluation.tasks if task.task in names]


def multi_row_counts(whole: MultiEvaluation, parts: Sequence[TaskEvaluation]) -> Iterator[str]:
    """How many rows were evaluated, of all labels if their counts are equal."""
    counts = {part.task: row_counts(part) for part in parts}
    if len(set(counts.values())) == 1:
        counts = {whole.task: next(iter(counts.values()))}
    yield from (f"{name}: {count}" for name, count in counts.items())


def row_counts(task: TaskEvaluation) -> str:
    """How many rows were evaluated, and why the others were not."""
    rows = task.rows
    judged = rows.evaluated if task.judged else 0
    parts = [f"{judged:,} of {rows.gold:,} gold documents evaluated"]
    if rows.unlabelled:
        parts.append(f"{rows.unlabelled:,} without a gold label")
    if rows.not_in_corpus:
        parts.append(f"{rows.not_in_corpus:,} not in the corpus")
    parts += [f"{n:,} without an answer ({status})" for status, n in rows.unanswered.items()]
    if rows.fitted:
        parts.append(f"{rows.fitted:,} left out, because {FITTED_BY} was fitted to them")
    if rows.evaluated and task.judged is None:
        parts.append(f"{rows.evaluated:,} are too few to judge (of {LEAST_ROWS})")
    return ", ".join(parts)


def gold_words(gold: Gold, task: str) -> str:
    """Who gave the gold labels of a task."""
    return {
        "people": "labels that people gave",
        "chosen": "labels that people gave to documents of a review, not chosen at random",
        "scores": "scores of another classifier",
        "teacher": "answers of another model",
    }[gold.kind(task)]


def score_grids(task: TaskEvaluation) -> Iterator[Grid]:
    """The scores of a task: in all, then by label and by threshold; none without rows."""
    if task.judged is None:
        return
    yield _figures(task.task, task.judged.scores.headlines)
    yield _labels([(label.label, label, None) for label in task.judged.scores.labels])
    if task.judged.cuts:
        yield _cuts([(cut.label, cut) for cut in task.judged.cuts])


def multi_grids(whole: MultiEvaluation, parts: Sequence[TaskEvaluation]) -> Iterator[Grid]:
    """The scores of a task of kind `multi`: in all, then by label and by threshold."""
    if not whole.figures:
        return
    yield _figures(whole.task, whole.figures)
    judged = [(_label_of(part), part.judged) for part in parts if part.judged is not None]
    yield _labels(
        [
            (label, scored, of_label.scores.headlines["ece"])
            for label, of_label in judged
            for scored in of_label.scores.labels
            if scored.label == YES
        ]
    )
    cuts = [(label, cut) for label, of_label in judged for cut in of_label.cuts if cut.label == YES]
    if cuts:
        yield _cuts(cuts)


def _figures(task: str, figures: Mapping[str, Figure]) -> Grid:
    rows = [(_NAMES[name], interval(figure)) for name, figure in figures.items()]
    return Grid(f"{task}, with 95 % intervals", ("", "figure"), rows)


def _label_of(part: TaskEvaluation) -> str:
    return part.task.partition(".")[2]


def multi_issues(parts: Sequence[TaskEvaluation]) -> list[LabelIssue]:
    """The label issues of all labels of a task of kind `multi`, the most probable first."""
    issues = [
        replace(issue, gold=f"{_label_of(part)}: {issue.gold}", likely=issue.likely)
        for part in parts
        for issue in part.label_issues
    ]
    return sorted(issues, key=lambda issue: issue.p_gold)


def _labels(labels: Sequence[tuple[str, LabelScore, Figure | None]]) -> Grid:
    """The scores of each label; its calibration error, too, if it is a task of yes or no."""
    error = ["ECE"] if any(ece for *_, ece in labels) else []
    return Grid(
        "by label",
        ("label", "precision", "recall", "F1", "AUROC", "AP", *error, "gold", "predicted"),
        [
            (
                name,
                *(
                    interval(Figure(value, *label.intervals.get(metric, (None, None))))
                    for metric, value in (("precision", label.precision), ("recall", label.recall))
                ),
                *map(number, (label.f1, label.auroc, label.ap)),
                *([number(ece.value)] if ece else []),
                f"{label.support:,}",
                f"{label.predicted:,}",
            )
            for name, label, ece in labels
        ],
    )


def _cuts(cuts: Sequence[tuple[str, Cut]]) -> Grid:
    rows = []
    for label, cut in cuts:
        figures = ["no threshold reaches this", "", "", ""]
        if at := cut.threshold:
            rounded = f"{at.threshold:.6g}"  # never up, because it may be copied into a rule
            least = rounded if float(rounded) <= at.threshold else repr(at.threshold)
            figures = [least, interval(at.precision), interval(at.recall), f"{at.flagged:,}"]
        rows.append((f"{cut.metric} {cut.least:g}", label, *figures))
    return Grid(
        "thresholds: a document has the label if its p is at least the threshold; "
        "precision and recall of other documents, by cross-validation",
        ("minimum", "label", "threshold", "precision", "recall", "documents"),
        rows,
        texts=2,
    )


def confusion_grid(labels: Sequence[str], judged: Judged) -> Grid:
    """The confusion matrix, or the most frequent confusions if it is too wide to be read."""
    counts = judged.scores.confusion
    if len(labels) <= WIDE_LABELS:
        return Grid(
            "confusion: gold label by row, answer by column",
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
        "the most frequent confusions; --json has all",
        ("gold", "answer", "documents"),
        [(gold, answer, f"{count:,}") for count, gold, answer in most],
        texts=2,
    )


def issue_grid(issues: Sequence[LabelIssue], most: int, *, texts: bool = False) -> Grid:
    """The first `most` label issues, with the documents' texts if asked for and known."""
    shown = issues[:most]
    with_texts = texts and any(issue.text is not None for issue in shown)
    left_out = len(issues) - len(shown)
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
