"""Differences between two snapshots, and judged runs, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np

from pipeline.evaluation.gates import Decision
from pipeline.integrity.diff import (
    USUAL_LIMITS,
    USUAL_PSI,
    Comparison,
    TaskChange,
    exceeded,
    shares,
)
from pipeline.report.console import Grid, Part, printed
from pipeline.report.run import SummaryJson, summary_facts, summary_json
from pipeline.verbs.run import JudgedRun

SHOWN_LABELS = 20  # a square of flips for more labels is too large for a terminal and for JSON


def comparison_parts(comparison: Comparison) -> Iterator[Part]:
    """Both sides, then each task's label shares and flipped answers."""
    alone_before, both, alone_after = comparison.documents
    facts = {
        "before": f"{comparison.before}, {comparison.rows[0]:,} documents",
        "after": f"{comparison.after}, {comparison.rows[1]:,} documents",
        "texts": f"{both:,} in both, {alone_before:,} removed, {alone_after:,} new",
    }
    if comparison.only_before:
        facts["tasks removed"] = ", ".join(comparison.only_before)
    if comparison.only_after:
        facts["tasks new"] = ", ".join(comparison.only_after)
    yield facts
    for task in comparison.tasks:
        yield from ("", task_grid(task), drift_line(task, comparison))


show_comparison = printed(comparison_parts)


@dataclass(frozen=True, slots=True)
class TaskChangeJson:
    """One task, before and after."""

    fps: tuple[str, str]
    labels: tuple[str, ...]
    before: list[int]  # rows
    after: list[int]
    psi: float
    jensen_shannon: float
    flip_rate: float
    newly_failing: int
    failing_ids: tuple[str, ...]  # the first of them


@dataclass(frozen=True, slots=True)
class FlipMatrixJson(TaskChangeJson):
    """With the texts by label before and label after."""

    flips: list[list[int]]


@dataclass(frozen=True, slots=True)
class FlipsJson(TaskChangeJson):
    """Of many labels, with the texts by changed label: `from`, `to`, `documents`."""

    flipped: list[Mapping[Literal["from", "to", "documents"], str | int]]


@dataclass(frozen=True, slots=True)
class MultiChangeJson(TaskChangeJson):
    """Of the kind `multi`; `psi` and `jensen_shannon` are the largest of its labels."""

    answered: tuple[int, int]  # rows before and after; `before` and `after` are those with a label
    gained: list[int]  # texts, by label
    lost: list[int]


@dataclass(frozen=True, slots=True)
class ComparisonJson:
    """Two snapshots, compared."""

    before: str
    after: str
    rows: Mapping[Literal["before", "after"], int]
    texts: Mapping[Literal["before_alone", "both", "after_alone"], int]
    only_before: tuple[str, ...]  # tasks
    only_after: tuple[str, ...]
    tasks: Mapping[str, FlipMatrixJson | FlipsJson | MultiChangeJson]


def comparison_json(comparison: Comparison) -> ComparisonJson:
    """The JSON form of a comparison."""
    alone_before, both, alone_after = comparison.documents
    return ComparisonJson(
        before=comparison.before,
        after=comparison.after,
        rows={"before": comparison.rows[0], "after": comparison.rows[1]},
        texts={"before_alone": alone_before, "both": both, "after_alone": alone_after},
        only_before=comparison.only_before,
        only_after=comparison.only_after,
        tasks={task.task: _task_json(task) for task in comparison.tasks},
    )


def task_grid(task: TaskChange) -> Grid:
    """The shares of the labels before and after, and how many answers went from one to another."""
    if task.flips is None:
        return _multi_grid(task)
    title = _title(task)
    columns, rows = list(task.labels), list(range(len(task.labels)))
    if len(rows) > SHOWN_LABELS:
        title += f": the {SHOWN_LABELS} most frequent of {len(rows):,} labels"
        order = np.argsort(-(task.before + task.after), kind="stable")
        columns, rows = [], order[:SHOWN_LABELS].tolist()
    before, after = shares(task.before), shares(task.after)
    return Grid(
        title,
        ("label", "before", "after", *(f"→ {label}" for label in columns)),
        [
            (
                task.labels[row],
                f"{before[row]:.2%}",
                f"{after[row]:.2%}",
                *(f"{count:,}" for count in task.flips[row][: len(columns)]),
            )
            for row in rows
        ],
    )


def _multi_grid(task: TaskChange) -> Grid:
    """The shares of the documents with each label, and how many texts gained or lost it."""
    before, after = (
        counts / max(1, rows)
        for counts, rows in zip((task.before, task.after), task.answered, strict=True)
    )
    order = np.argsort(-(task.before + task.after), kind="stable")[:SHOWN_LABELS]
    rows = sorted(order.tolist())
    title = _title(task)
    if len(rows) < len(task.labels):
        title += f": the {len(rows)} most frequent of {len(task.labels):,} labels"
    return Grid(
        title,
        ("label", "before", "after", "gained", "lost"),
        [
            (
                task.labels[row],
                f"{before[row]:.2%}",
                f"{after[row]:.2%}",
                f"{task.gained[row]:,}",
                f"{task.lost[row]:,}",
            )
            for row in rows
        ],
    )


def _title(task: TaskChange) -> str:
    return task.task if task.fps[0] == task.fps[1] else f"{task.task} {' → '.join(task.fps)}"


def drift_line(task: TaskChange, comparison: Comparison) -> str:
    """Whether a task of the comparison changed, by how much, and documents that newly fail."""
    is_stable = not exceeded(replace(comparison, tasks=(task,)), USUAL_LIMITS)
    verdict = "stable" if is_stable else "shifted" if task.psi > USUAL_PSI else "changed"
    line = (
        f"{verdict}: PSI {task.psi:.4f} · Jensen-Shannon {task.jensen_shannon:.4f} bits · "
        f"{task.flip_rate:.2%} of {task.texts:,} shared texts flipped"
    )
    if not task.newly_failing:
        return line
    shown = ", ".join(task.failing_ids[:5])
    more = ", ..." if task.newly_failing > 5 else ""
    return f"{line} · {task.newly_failing:,} newly failing: {shown}{more}"


def _task_json(
    task: TaskChange,
) -> FlipMatrixJson | FlipsJson | MultiChangeJson:
    change = TaskChangeJson(
        fps=task.fps,
        labels=task.labels,
        before=task.before.tolist(),
        after=task.after.tolist(),
        psi=task.psi,
        jensen_shannon=task.jensen_shannon,
        flip_rate=task.flip_rate,
        newly_failing=task.newly_failing,
        failing_ids=task.failing_ids,
    )
    if task.flips is None:
        gained, lost = task.gained.tolist(), task.lost.tolist()
        return MultiChangeJson(**asdict(change), answered=task.answered, gained=gained, lost=lost)
    if len(task.labels) <= SHOWN_LABELS:
        return FlipMatrixJson(**asdict(change), flips=task.flips.tolist())
    # only the cells of changed labels
    cells = [(x, y) for x, y in np.argwhere(task.flips) if x != y]
    names = [(task.labels[x], task.labels[y], int(task.flips[x, y])) for x, y in cells]
    return FlipsJson(
        **asdict(change), flipped=[{"from": a, "to": b, "documents": n} for a, b, n in names]
    )


@printed
def show_judged_run(run: JudgedRun) -> Iterator[Part]:
    """The run, the changes, the gates and whether the snapshot was published."""
    yield [*summary_facts(run.outcome)]
    if run.comparison:
        yield from ("", *comparison_parts(run.comparison))
    yield ""
    rows = {}
    for decision in run.decisions:
        value = "undefined" if decision.value is None else f"{decision.value:.4f}"
        rows[f"gate {decision.gate}"] = f"{value}, {'passes' if decision.passed else 'FAILS'}"
    yield {**rows, "verdict": _verdict(run)}
    yield from (f"  {reason}" for reason in run.rejected)


@dataclass(frozen=True, slots=True)
class JudgedRunJson:
    """A run with gates or limits, for other programs."""

    published: bool
    snapshot: int | None
    previous: int | None  # the snapshot that it was compared with
    reasons: tuple[str, ...]  # not published if there are any
    gates: tuple[Decision, ...]
    diff: ComparisonJson | None
    run: SummaryJson


def judged_run_json(run: JudgedRun) -> JudgedRunJson:
    """The JSON form of a run and its judgement."""
    return JudgedRunJson(
        published=run.published,
        snapshot=run.outcome.snapshot,
        previous=run.previous,
        reasons=run.rejected,
        gates=run.decisions,
        diff=comparison_json(run.comparison) if run.comparison else None,
        run=summary_json(run.outcome),
    )


def _verdict(run: JudgedRun) -> str:
    current = "there is no snapshot yet"
    if run.previous is not None:
        current = f"snapshot {run.previous:08d} stays current"
    if not run.outcome.complete:
        return f"incomplete, not compared; {current}; run again"
    if run.rejected:
        return f"REJECTED; {current}; run without gates to publish it"
    if not run.published:
        return f"not published; {current}"
    if run.outcome.snapshot == run.previous:
        return f"nothing new; {current}"
    return f"published as snapshot {run.outcome.snapshot:08d}"
