"""An evaluation as tables for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.evaluation.metrics import BINS, HEADLINES, Figure
from pipeline.report.console import escape_controls, truncate, two_columns
from pipeline.verbs.evaluate import (
    Cut,
    Evaluation,
    LabelIssue,
    RowCounts,
    TaskEvaluation,
    VersionScores,
)

SHOWN_ISSUES = 10
_ID_CHARS = 40
WIDE_LABELS = 12  # a confusion matrix of more labels is too wide for a terminal
NAMES = {
    "accuracy": "accuracy",
    "f1": "macro F1",
    "auroc": "AUROC",
    "ap": "average precision",
    "brier": "Brier",
    "ece": "calibration error",
}


def show_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Prints where answers and gold are from, each task's tables, and the gates."""
    console.print(two_columns(dict(sources(evaluation))), markup=False)
    for task in evaluation.tasks:
        console.print()
        for table in _task_tables(task):
            console.print(table, markup=False)
    for decision in evaluation.decisions:
        verdict = "passed" if decision.passed else "FAILED"
        line = f"{verdict}: {escape_controls(decision.gate)} (it is {number(decision.value)})"
        console.print(line, markup=False)


def sources(evaluation: Evaluation) -> Iterator[tuple[str, str]]:
    """Where the answers and the gold are from: names and values."""
    gold, place = (
        evaluation.gold,
        f"{evaluation.output}, snapshot {evaluation.snapshot:08d} of {evaluation.spec}",
    )
    yield "output", escape_controls(place)
    if evaluation.newest_snapshot != evaluation.snapshot:
        yield (
            "not the newest",
            f"snapshot {evaluation.newest_snapshot:08d} has other questions or another model than "
            f"the spec now",
        )
    joined = "id" if gold.by == "doc_id" else "the text's hash"
    yield "gold", escape_controls(f"{gold.source}, {gold.rows:,} documents, joined by {joined}")
    yield (
        "in the corpus",
        f"{evaluation.in_corpus:,} of them; the corpus has {evaluation.corpus_rows:,} rows",
    )
    if gold.repeated:
        yield "repeated", f"{gold.repeated:,} gold rows repeat another; each document counts once"
    if gold.contradictory:
        yield (
            "left out",
            f"{gold.contradictory:,} gold rows, which give one document different labels",
        )
    if evaluation.repeated_in_corpus:
        rows = f"{evaluation.repeated_in_corpus:,} corpus rows have the key of another row"
        yield "ambiguous", f"{rows}; the first one is evaluated"
    if evaluation.without_gold:
        yield "without gold", ", ".join(evaluation.without_gold)


def row_counts(rows: RowCounts) -> str:
    """How many rows were evaluated, and why the others were not."""
    parts = [f"{rows.evaluated:,} of {rows.gold:,} gold documents evaluated"]
    if rows.unlabelled:
        parts.append(f"{rows.unlabelled:,} without a gold label")
    if rows.not_in_corpus:
        parts.append(f"{rows.not_in_corpus:,} not in the corpus")
    answers = (
        f"{n:,} without an answer ({escape_controls(s)})" for s, n in rows.unanswered.items()
    )
    return ", ".join([*parts, *answers])


def warning(task: TaskEvaluation) -> str:
    """A warning if the task's calibrated scores are too good, else nothing."""
    if not task.calibrated_on_gold:
        return ""
    return "; the calibration was fitted to these rows, so its scores are too good"


def threshold(value: float) -> str:
    """A threshold to copy into a rule: rounded, but never up."""
    short = f"{value:.6g}"
    return short if float(short) <= value else repr(value)


def interval(figure: Figure) -> str:
    if figure.value is None or figure.low is None:
        return number(figure.value)
    return f"{number(figure.value)} [{number(figure.low)}, {number(figure.high)}]"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"  # noqa: RUF001


def _task_tables(task: TaskEvaluation) -> Iterator[Table | str]:
    yield f"{task.task}: {row_counts(task.rows)}{warning(task)}"
    if not task.versions:
        return
    yield headline_table(task)
    for name, version in task.versions.items():
        which = f" ({name})" if len(task.versions) > 1 else ""
        yield _label_table(version, which)
        if version.cuts:
            yield _cut_table(version, which)
    raw = next(iter(task.versions.values()))
    yield _confusion_table(task.labels, raw.scores.confusion)
    if task.label_issues:
        yield _label_issue_table(task)


def headline_table(task: TaskEvaluation) -> Table:
    scores = {name: version.scores for name, version in task.versions.items()}
    resamples = next(iter(scores.values())).resamples
    table = _titled(f"{task.task}, with 95 % intervals of {resamples:,} resamples")
    table.add_column("")
    for name in scores:
        table.add_column(name, justify="right", no_wrap=True)
    for name in HEADLINES:
        shown = f"{NAMES[name]} ({BINS} bins of equal mass)" if name == "ece" else NAMES[name]
        table.add_row(shown, *(interval(each.headlines[name]) for each in scores.values()))
    return table


def _label_table(version: VersionScores, which: str) -> Table:
    table = _titled(f"by label{which}")
    names = ("label", "precision", "recall", "F1", "AUROC", "AP", "gold", "predicted")
    for name in names:
        table.add_column(name, justify="left" if name == "label" else "right")
    for each in version.scores.labels:
        figures = (each.precision, each.recall, each.f1, each.auroc, each.ap)
        counts = f"{each.support:,}", f"{each.predicted:,}"
        table.add_row(escape_controls(each.label), *map(number, figures), *counts)
    return table


def _cut_table(version: VersionScores, which: str) -> Table:
    table = _titled(
        f"thresholds{which}: a document has the label if its p is at least the threshold"
    )
    for name in ("minimum", "label", "threshold", "precision", "recall", "documents"):
        table.add_column(name, justify="left" if name in ("minimum", "label") else "right")
    for cut in version.cuts:
        minimum = f"{cut.metric} {cut.least:g}"
        if cut.threshold is None:
            table.add_row(minimum, escape_controls(cut.label), "no threshold has it", "", "", "")
            continue
        at = cut.threshold
        figures = threshold(at.threshold), number(at.precision), number(at.recall)
        table.add_row(minimum, escape_controls(cut.label), *figures, f"{at.flagged:,}")
    return table


def _confusion_table(labels: tuple[str, ...], counts: tuple[tuple[int, ...], ...]) -> Table:
    if len(labels) > WIDE_LABELS:
        return _confused_table(labels, counts)
    table = _titled("confusion: gold label by row, answer (raw) by column")
    table.add_column("gold")
    for label in labels:
        table.add_column(escape_controls(label), justify="right")
    for label, row in zip(labels, counts, strict=True):
        table.add_row(escape_controls(label), *(f"{count:,}" for count in row))
    return table


def _confused_table(labels: tuple[str, ...], counts: tuple[tuple[int, ...], ...]) -> Table:
    """The most frequent confusions, if a confusion matrix is too wide for a terminal."""
    pairs = [
        (count, gold, answer)
        for gold, row in zip(labels, counts, strict=True)
        for answer, count in zip(labels, row, strict=True)
        if count and gold != answer
    ]
    table = _titled("the most frequent confusions (raw); --json has all")
    for name in ("gold", "answer", "documents"):
        table.add_column(name, justify="right" if name == "documents" else "left")
    for count, gold, answer in sorted(pairs, key=lambda pair: -pair[0])[:WIDE_LABELS]:
        table.add_row(escape_controls(gold), escape_controls(answer), f"{count:,}")
    return table


def _label_issue_table(task: TaskEvaluation) -> Table:
    shown = task.label_issues[:SHOWN_ISSUES]
    more = len(task.label_issues) - len(shown)
    rest = f"; {more:,} more in --json" if more else ""
    table = _titled(f"gold labels that are probably wrong, the most probable first{rest}")
    for name in ("document", "gold", "answer", "p of gold", "p of answer"):
        table.add_column(name, justify="right" if name.startswith("p ") else "left")
    for each in shown:
        table.add_row(
            truncate(each.doc_id, _ID_CHARS),
            escape_controls(each.gold),
            escape_controls(each.likely),
            number(each.p_gold),
            number(each.p_likely),
        )
    return table


def _titled(title: str) -> Table:
    return Table(title=title, title_justify="left")


def evaluation_json(evaluation: Evaluation) -> dict[str, Any]:
    """The evaluation as JSON values, with every label issue."""
    gold = evaluation.gold
    return {
        "spec": evaluation.spec,
        "output": evaluation.output,
        "snapshot": evaluation.snapshot,
        "newest_snapshot": evaluation.newest_snapshot,
        "corpus_rows": evaluation.corpus_rows,
        "gold": {
            "source": gold.source,
            "joined_by": gold.by,
            "documents": gold.rows,
            "in_corpus": evaluation.in_corpus,
            "repeated": gold.repeated,
            "contradictory": gold.contradictory,
            "repeated_in_corpus": evaluation.repeated_in_corpus,
        },
        "tasks": {task.task: _task_json(task) for task in evaluation.tasks},
        "without_gold": list(evaluation.without_gold),
        "gates": [asdict(decision) for decision in evaluation.decisions],
        "passed": evaluation.passed,
    }


def _task_json(task: TaskEvaluation) -> dict[str, Any]:
    return {
        "labels": list(task.labels),
        "rows": asdict(task.rows),
        "versions": {
            name: {
                **asdict(version.scores),
                "ece_bins": f"{BINS}, equal mass",
                "thresholds": [_cut_json(cut) for cut in version.cuts],
            }
            for name, version in task.versions.items()
        },
        "calibrated_on_gold": task.calibrated_on_gold,
        "mislabelled": [_issue_json(issue) for issue in task.label_issues],
    }


def _cut_json(cut: Cut) -> dict[str, Any]:
    threshold = None if cut.threshold is None else asdict(cut.threshold)
    return {"label": cut.label, "wish": cut.metric, "wanted": cut.least, "found": threshold}


def _issue_json(issue: LabelIssue) -> dict[str, Any]:
    return {
        "doc_id": issue.doc_id,
        "given": issue.gold,
        "likely": issue.likely,
        "p_given": issue.p_gold,
        "p_likely": issue.p_likely,
        "text": issue.text,
    }
