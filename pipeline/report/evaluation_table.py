"""An evaluation, for people in a terminal and as JSON values.

Knows figures. Knows nothing of how they came about.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.evaluation.metrics import BINS
from pipeline.evaluation.scores import HEADLINES, Figure
from pipeline.report.console import escape_controls, truncate, two_columns
from pipeline.verbs.evaluate import Evaluation, RowCounts, TaskEvaluation, VersionScores

SHOWN_ISSUES = 10
_ID_CHARS = 40
WIDE_LABELS = 12  # more make a square that fits no terminal
NAMES = {
    "accuracy": "accuracy",
    "f1": "macro F1",
    "auroc": "AUROC",
    "ap": "average precision",
    "brier": "Brier",
    "ece": "calibration error",
}


def show_evaluation(found: Evaluation, console: Console) -> None:
    """What was compared with what, then each task's tables, then the gates."""
    console.print(two_columns(dict(whereabouts(found))), markup=False)
    for task in found.tasks:
        console.print()
        for table in _task_tables(task):
            console.print(table, markup=False)
    for decision in found.decisions:
        verdict = "passed" if decision.passed else "FAILED"
        line = f"{verdict}: {escape_controls(decision.gate)} (it is {number(decision.value)})"
        console.print(line, markup=False)


def whereabouts(found: Evaluation) -> Iterator[tuple[str, str]]:
    """What was compared with what: names and values."""
    gold, place = found.gold, f"{found.output}, snapshot {found.snapshot:08d} of {found.spec}"
    yield "output", escape_controls(place)
    if found.newest_snapshot != found.snapshot:
        yield (
            "not the newest",
            f"snapshot {found.newest_snapshot:08d} has other wordings or another model than the "
            f"spec asks for now",
        )
    joined = "id" if gold.by == "doc_id" else "the text's hash"
    yield "gold", escape_controls(f"{gold.source}, {gold.rows:,} documents, joined by {joined}")
    yield "in the corpus", f"{found.in_corpus:,} of them; the corpus has {found.corpus_rows:,} rows"
    if gold.repeated:
        yield "repeated", f"{gold.repeated:,} gold rows stand there again: each counts once"
    if gold.contradictory:
        yield (
            "left out",
            f"{gold.contradictory:,} gold rows that give one document different labels",
        )
    if found.repeated_in_corpus:
        rows = f"{found.repeated_in_corpus:,} corpus rows have the key of another"
        yield "ambiguous", f"{rows}: the first is judged"
    if found.without_gold:
        yield "without gold", ", ".join(found.without_gold)


def row_counts(rows: RowCounts) -> str:
    """How many rows were judged, and where the others went."""
    parts = [f"{rows.evaluated:,} of {rows.gold:,} gold documents judged"]
    if rows.unlabelled:
        parts.append(f"{rows.unlabelled:,} without a gold label")
    if rows.not_in_corpus:
        parts.append(f"{rows.not_in_corpus:,} not in the corpus")
    answers = (
        f"{n:,} without an answer ({escape_controls(s)})" for s, n in rows.unanswered.items()
    )
    return ", ".join([*parts, *answers])


def warning(task: TaskEvaluation) -> str:
    """What must be known to read the task's figures rightly."""
    if not task.calibrated_on_gold:
        return ""
    return "; the calibration was fitted to these very rows, so judge it by others"


def threshold(value: float) -> str:
    """A cut as it may be written into a rule: never above the value itself."""
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
    table = _titled(f"thresholds{which}: the label where its p is at least so much")
    for name in ("wanted", "label", "threshold", "precision", "recall", "documents"):
        table.add_column(name, justify="left" if name in ("wanted", "label") else "right")
    for cut in version.cuts:
        wanted = f"{cut.wish} {cut.wanted:g}"
        if cut.found is None:
            table.add_row(wanted, escape_controls(cut.label), "no threshold gives it", "", "", "")
            continue
        at = cut.found
        figures = threshold(at.threshold), number(at.precision), number(at.recall)
        table.add_row(wanted, escape_controls(cut.label), *figures, f"{at.flagged:,}")
    return table


def _confusion_table(labels: tuple[str, ...], counts: tuple[tuple[int, ...], ...]) -> Table:
    if len(labels) > WIDE_LABELS:
        return _confused_table(labels, counts)
    table = _titled("gold, against what was answered (raw)")
    table.add_column("gold")
    for label in labels:
        table.add_column(escape_controls(label), justify="right")
    for label, row in zip(labels, counts, strict=True):
        table.add_row(escape_controls(label), *(f"{count:,}" for count in row))
    return table


def _confused_table(labels: tuple[str, ...], counts: tuple[tuple[int, ...], ...]) -> Table:
    """Of many labels the most frequent confusions: a square of them fits no terminal."""
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
    table = _titled(f"gold that is perhaps wrong, the surest first{rest}")
    for name in ("document", "gold says", "answer says", "p of gold", "p of answer"):
        table.add_column(name, justify="right" if name.startswith("p ") else "left")
    for each in shown:
        table.add_row(
            truncate(each.doc_id, _ID_CHARS),
            escape_controls(each.given),
            escape_controls(each.likely),
            number(each.p_given),
            number(each.p_likely),
        )
    return table


def _titled(title: str) -> Table:
    return Table(title=title, title_justify="left")


def evaluation_json(found: Evaluation) -> dict[str, Any]:
    """The same for other programs, with every suspected row."""
    gold = found.gold
    return {
        "spec": found.spec,
        "output": found.output,
        "snapshot": found.snapshot,
        "newest_snapshot": found.newest_snapshot,
        "corpus_rows": found.corpus_rows,
        "gold": {
            "source": gold.source,
            "joined_by": gold.by,
            "documents": gold.rows,
            "in_corpus": found.in_corpus,
            "repeated": gold.repeated,
            "contradictory": gold.contradictory,
            "repeated_in_corpus": found.repeated_in_corpus,
        },
        "tasks": {task.task: _task_json(task) for task in found.tasks},
        "without_gold": list(found.without_gold),
        "gates": [asdict(decision) for decision in found.decisions],
        "passed": found.passed,
    }


def _task_json(task: TaskEvaluation) -> dict[str, Any]:
    return {
        "labels": list(task.labels),
        "rows": asdict(task.rows),
        "versions": {
            name: {
                **asdict(version.scores),
                "ece_bins": f"{BINS}, equal mass",
                "thresholds": [asdict(cut) for cut in version.cuts],
            }
            for name, version in task.versions.items()
        },
        "calibrated_on_gold": task.calibrated_on_gold,
        "mislabelled": [asdict(suspect) for suspect in task.label_issues],
    }
