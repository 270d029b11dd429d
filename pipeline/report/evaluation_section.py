"""An evaluation as sections of a page. Entry point: `evaluation_section`.

Every text may be hostile, so `table` and `safe` escape it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from pipeline.evaluation.metrics import RANKED_LABELS
from pipeline.gold.labels import Gold
from pipeline.report.console import Grid, number
from pipeline.report.doubts import evaluation_doubts
from pipeline.report.evaluation_plots import plots
from pipeline.report.evaluation_table import issue_grid, row_counts, score_grids, sources
from pipeline.report.page import bullets, facts, safe, table
from pipeline.verbs.evaluate import Evaluation, TaskEvaluation

SHOWN_ISSUES = 100
_NOTE = (
    "Intervals of accuracy, precision and recall are Wilson's, that of AUROC of two labels is "
    "Newcombe's, the others are from bootstrap resamples. Macro F1 is the mean over the labels "
    "that occur. "
    "With two labels, AUROC and average precision are those of the first label; with more, they "
    f"are the mean of each label against the rest. Above {RANKED_LABELS} labels they have no "
    "interval. The calibration error is that of the answer's p."
)


def evaluation_section(evaluation: Evaluation, spec_file: str) -> Iterator[str]:
    """Parts of a page: the next steps, and all figures and plots of each task."""
    yield "<h3>What to do next</h3>"
    yield bullets(_next_steps(evaluation, spec_file))
    gates = [
        (decision.gate, "passed" if decision.passed else "FAILED", number(decision.value))
        for decision in evaluation.decisions
    ]
    if gates:
        yield table(Grid("", ("gate", "", "value"), gates, texts=2))
    yield "<h3>Where the figures are from</h3>"
    rows = [("model", evaluation.model), ("labelled", evaluation.labelled_at)]
    yield facts([*rows, *sources(evaluation)])
    for task in evaluation.tasks:
        yield from _task_section(task, evaluation.gold)


def _next_steps(evaluation: Evaluation, spec_file: str) -> Iterator[str]:
    """What the figures call for, with the command that does it."""
    spec, gold = shlex.quote(spec_file), evaluation.gold
    for task in evaluation.tasks:
        name = safe(task.task)
        if task.at_chance:
            words = shlex.join(["--gold", gold.source, *gold.options.words(task.task)])
            fit = f"assay fit {spec} {words}"
            yield f"{name}: train a readout: <code>{safe(fit)}</code>"
        if task.label_issues:
            yield f"{name}: read the {len(task.label_issues):,} gold labels that may be wrong"
        if task.swapped:
            yield f"{name}: check which label each value of the gold means"
    if not evaluation.passed:
        yield "a gate failed: do not publish these answers before you know why"
    elif all(t.versions and not t.at_chance and not t.swapped for t in evaluation.tasks):
        command = f"<code>{safe(f'assay filter {spec} --to FOLDER')}</code>"
        if evaluation.rule is None:
            yield f"write a rule as <code>filter.keep</code> in the spec, then run {command}"
        else:
            rule = f"<code>{safe(evaluation.rule)}</code>"
            yield f"write the documents that the spec's rule, {rule}, keeps: {command}"


def _task_section(task: TaskEvaluation, gold: Gold) -> Iterator[str]:
    yield f"<h3>{safe(task.task)}</h3><p>{safe(row_counts(task))}</p>"
    yield from (f"<p><strong>{safe(each)}</strong></p>" for each in evaluation_doubts(task, gold))
    if not task.versions:
        return
    headlines, *others = score_grids(task)
    yield table(headlines, level=4) + f"<p>{safe(_NOTE)}</p>"
    for each in plots(task):
        kind = "plots wide" if each.wide else "plots"
        # — what is scrolled needs the focus of a keyboard
        charts = "".join(f"<div tabindex='0'>{svg}</div>" for svg in each.svgs)
        yield f"<h4>{safe(each.title)}</h4><div class='{kind}'>{charts}</div>"
    for grid in others:
        yield table(grid, level=4)
    if task.label_issues:  # their texts may offend
        issues = table(issue_grid(task, SHOWN_ISSUES, texts=True), level=4)
        yield f"<details><summary>Gold labels that may be wrong, with texts</summary>{issues}"
        yield "</details>"
