"""Warnings of answers that may be meaningless, each one line with what to do.

Entry points: `label_doubts`, for the labels that a run gave, `evaluation_doubts` and
`shared_doubts`, for the figures of one evaluation and of several, `report_doubts`, for all of a
report, and `check_doubts`, for the answers to the few documents of a check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.gold.fitted_texts import LEAST_ROWS
from pipeline.gold.labels import RANDOM
from pipeline.integrity.diff import USUAL_LIMITS, exceeded
from pipeline.sources.documents import is_failed_status
from pipeline.spec.labels import task_of

if TYPE_CHECKING:
    from pipeline.verbs.check import Findings
    from pipeline.verbs.corpus_report import CorpusReport
    from pipeline.verbs.evaluate import TaskEvaluation

# With fewer documents, or a smaller share of them, one label may be due to chance.
LEAST_DOCUMENTS = 50
CONSTANT_SHARE = 0.99
# Below it the model would nearly always generate another token, and p compares rare tokens.
LEAST_MASS = 0.01


def label_doubts(
    labels: Mapping[str, Mapping[str, int]], answered: Mapping[str, int]
) -> Iterator[str]:
    """A line for each task that gives nearly all documents with an answer one label.

    The counts are documents, by task and label; a document may have several labels.
    """
    for task, counts in labels.items():
        documents = answered[task]
        most = max(counts.values(), default=0)
        if documents >= LEAST_DOCUMENTS and most >= CONSTANT_SHARE * documents:
            label = next(name for name, count in counts.items() if count == most)
            yield (
                f"{task}: {most:,} of {documents:,} documents have the label {label!r}. If the "
                "documents differ, the model does not answer this question. Measure the answers "
                "(assay eval), reword the question, train a readout (assay fit), or use a larger "
                "model"
            )


def evaluation_doubts(task: TaskEvaluation) -> Iterator[str]:
    """A line for each reason why the figures of a task are unreliable or meaningless."""
    if task.chosen:
        yield (
            f"{task.task}: {task.chosen}, so the figures are not those of the corpus, and no gate "
            f"reads them. Measure on a random sample ({RANDOM})"
        )
    if task.scores is None:
        yield _nothing_judged(task)
        return
    auroc = task.auroc
    if task.swapped:
        yield (
            f"{task.task}: the interval of AUROC, {auroc.low:.3f} to {auroc.high:.3f}, is below "
            f".5: labels of the gold look swapped. {_unswapped(task)}"
        )
    if task.at_chance:
        yield (
            f"{task.task}: the interval of AUROC, {auroc.low:.3f} to {auroc.high:.3f}, includes "
            ".5: these answers may be no better than chance. Train a readout (assay fit), use a "
            "larger model, or give more gold rows"
        )


def shared_doubts(tasks: Iterable[TaskEvaluation]) -> Iterator[str]:
    """The doubts of several evaluations; a reason that several share is one line."""
    names: dict[str, list[str]] = {}
    for task in tasks:
        for doubt in evaluation_doubts(task):
            names.setdefault(doubt.removeprefix(f"{task.task}: "), []).append(task.task)
    yield from (f"{', '.join(of)}: {reason}" for reason, of in names.items())


def report_doubts(report: CorpusReport) -> Iterator[str]:
    """Every reason why the labels, the figures or the filter of a report may mislead."""
    if report.partial:
        yield "the snapshot leaves out documents of the input. Run again (assay run)"
    yield from report.older_answers
    for task in report.tasks:
        failed = {name: n for name, n in task.statuses.items() if is_failed_status(name)}
        if failed:
            shown = ", ".join(f"{name} {count:,}" for name, count in failed.items())
            yield f"{task.task}: {sum(failed.values()):,} documents have no answer ({shown})"
    yield from label_doubts(
        {task.task: task.labels for task in report.tasks},
        {task.task: task.answered for task in report.tasks},
    )
    quality = report.quality
    if quality is not None:
        yield from shared_doubts(quality.tasks.values())
    if report.drift is not None:
        # — another question or model has other answers: that is no drift
        of_tasks = report.drift.tasks.items()
        same = {task: change for task, change in of_tasks if change.before.fp == change.after.fp}
        drift, before = replace(report.drift, tasks=same), f"since {report.drift.before}"
        yield from (f"{before}, {reason}" for reason in exceeded(drift, USUAL_LIMITS))


def _nothing_judged(task: TaskEvaluation) -> str:
    rows = task.rows
    if not rows.fitted:
        return f"{task.task}: no gold document has an answer, so nothing is judged"
    return (
        f"{task.task}: nothing is judged, because {rows.fitted:,} gold documents were fitted to, "
        f"and the other {rows.evaluated:,} are too few. Give gold labels of {LEAST_ROWS} other "
        "documents, or fit again with some held out (assay fit --hold-out 0.2)"
    )


def _unswapped(task: TaskEvaluation) -> str:
    """How to swap the labels."""
    if task_of(task.task) != task.task:
        return "If the gold is right, ask in other words, or train a readout (assay fit)"
    if task.gold == "scores":
        return f"If they are, name the other label below gold.scores: {task.task}.LABEL: COLUMN"
    if len(task.labels) == 2:
        first, second = task.labels
        swapped = f"{{{first}: {second}, {second}: {first}}}"
        return f"If they are, swap them below gold.values, as in {swapped}"
    return "Write which label each value means below gold.values, as in VALUE: LABEL"


def check_doubts(findings: Findings) -> Iterator[str]:
    """The lines of a check: about the ids of documents, then about the answers to each task."""
    if findings.repeated_ids:
        yield (
            f"input.id: {findings.repeated_ids:,} of the first {findings.ids_read:,} documents "
            "share their id with another document, so a join by id mixes them. Name a column with "
            "a different id for each document, or leave input.id out: the id is then the hash of "
            "the text"
        )
    for task, facts in findings.answers.items():
        if facts.fragments:
            read = ", ".join(f"{label!r} by {token!r}" for label, token in facts.fragments.items())
            yield (
                f"{task}: labels are scored by the first letters of a word: {read}. Many words "
                "begin with these letters. Write other texts for the label"
            )
        if facts.mass is not None and facts.mass < LEAST_MASS:
            yield (
                f"{task}: mass is at most {facts.mass:.2g}: the model would nearly always answer "
                "something else. Let the question name its answers, or write the texts that the "
                "model would say (labels: {name: [text, ...]})"
            )
