"""Differences between two snapshots, and judged runs, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.evaluation.gates import Decision
from pipeline.integrity.diff import USUAL_LIMITS, USUAL_PSI, Comparison, TaskChange, exceeded
from pipeline.report.console import Grid, Part, printed
from pipeline.report.run import SummaryJson, summary_facts, summary_json
from pipeline.verbs.run import JudgedRun

SHOWN_LABELS = 20  # of a task, and of its changes of labels


def comparison_parts(comparison: Comparison) -> Iterator[Part]:
    """Both sides, then each task's label shares and flipped answers."""
    texts = comparison.texts
    facts = {
        "before": f"{comparison.before}, {comparison.rows['before']:,} documents",
        "after": f"{comparison.after}, {comparison.rows['after']:,} documents",
        "texts": f"{texts['both']:,} in both, {texts['before_alone']:,} removed, "
        f"{texts['after_alone']:,} new",
    }
    if comparison.only_before:
        facts["tasks removed"] = ", ".join(comparison.only_before)
    if comparison.only_after:
        facts["tasks new"] = ", ".join(comparison.only_after)
    yield facts
    for task, change in comparison.tasks.items():
        yield ""
        yield from change_grids(task, change)
        yield drift_line(task, comparison)


show_comparison = printed(comparison_parts)


def change_grids(task: str, change: TaskChange) -> Iterator[Grid]:
    """The shares of the labels before and after, and the most frequent changes of labels."""
    before, after, gained, lost = change.before, change.after, Counter[str](), Counter[str]()
    for move in change.moves:
        gained[move.after or ""] += move.texts
        lost[move.before or ""] += move.texts
    title = task if before.fp == after.fp else f"{task} {before.fp} → {after.fp}"
    labels = list(before.labels)
    if len(labels) > SHOWN_LABELS:
        title += f": the {SHOWN_LABELS} most frequent of {len(labels):,} labels"
        labels.sort(key=lambda label: -(before.labels[label] + after.labels[label]))
    rows = [
        (
            label,
            *(f"{side.labels[label] / max(1, side.rows):.2%}" for side in (before, after)),
            f"{gained[label]:,}",
            f"{lost[label]:,}",
        )
        for label in labels[:SHOWN_LABELS]
    ]
    yield Grid(title, ("label", "before", "after", "gained", "lost"), rows)
    moved = [move for move in change.moves if move.before is not None and move.after is not None]
    if len(labels) > 2 and moved:
        shown = [(f"{m.before}", f"{m.after}", f"{m.texts:,}") for m in moved[:SHOWN_LABELS]]
        yield Grid("the most frequent changes", ("from", "to", "texts"), shown, texts=2)


def drift_line(task: str, comparison: Comparison) -> str:
    """Whether a task of the comparison changed, by how much, and documents that newly fail."""
    change = comparison.tasks[task]
    is_stable = not exceeded(replace(comparison, tasks={task: change}), USUAL_LIMITS)
    verdict = "stable" if is_stable else "shifted" if change.psi > USUAL_PSI else "changed"
    line = (
        f"{verdict}: PSI {change.psi:.4f} · Jensen-Shannon {change.jensen_shannon:.4f} bits · "
        f"{change.flip_rate:.2%} of {change.texts:,} shared texts flipped"
    )
    if not change.newly_failing:
        return line
    shown = ", ".join(change.failing_ids[:5])
    more = ", ..." if change.newly_failing > 5 else ""
    return f"{line} · {change.newly_failing:,} newly failing: {shown}{more}"


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
    diff: Comparison | None
    run: SummaryJson


def judged_run_json(run: JudgedRun) -> JudgedRunJson:
    """The JSON form of a run and its judgement."""
    return JudgedRunJson(
        published=run.published,
        snapshot=run.outcome.snapshot,
        previous=run.previous,
        reasons=run.rejected,
        gates=run.decisions,
        diff=run.comparison,
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
