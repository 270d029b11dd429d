"""Differences between two snapshots, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from pipeline.integrity.diff import USUAL_LIMITS, USUAL_PSI, Comparison, TaskChange, exceeded
from pipeline.report.console import Grid, Part, printed

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
    facts |= {f"{task}: weaker": reason for task, reason in comparison.weaker.items()}
    yield facts
    for task, change in comparison.tasks.items():
        yield ""
        yield from change_grids(task, change)
        if asked := version_facts(change):
            yield asked
        yield drift_line(task, comparison)


show_comparison = printed(comparison_parts)


def change_grids(task: str, change: TaskChange) -> Iterator[Grid]:
    """The shares of the labels before and after, and the most frequent changes of labels."""
    before, after, gained, lost = change.before, change.after, Counter[str](), Counter[str]()
    for move in change.moves:
        gained[move.after or ""] += move.texts
        lost[move.before or ""] += move.texts
    title = task if before.fp == after.fp else f"{task}, {_version(change)}"
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


def _version(change: TaskChange) -> str:
    names = ", ".join(name for name in change.changed if name != "question")
    reworded = "reworded" if "question" in change.changed else ""
    return "; ".join(filter(None, (reworded, names and f"another version: {names}")))


def version_facts(change: TaskChange) -> list[tuple[str, str]]:
    """Both questions of a task that was reworded."""
    sides = (("before", change.before), ("after", change.after))
    return [(f"question {when}", of.question) for when, of in sides if of.question is not None]


def drift_line(task: str, comparison: Comparison) -> str:
    """Whether a task of the comparison changed, by how much, and documents that newly fail."""
    change = comparison.tasks[task]
    is_stable = not exceeded(replace(comparison, tasks={task: change}), USUAL_LIMITS)
    verdict = "stable" if is_stable else "shifted" if change.psi > USUAL_PSI else "changed"
    line = (
        f"{verdict}: PSI {change.psi:.4f} · "
        f"{change.flip_rate:.2%} of {change.texts:,} shared texts flipped"
    )
    if not change.newly_failing:
        return line
    shown = ", ".join(change.failing_ids[:5])
    more = ", ..." if change.newly_failing > 5 else ""
    return f"{line} · {change.newly_failing:,} newly failing: {shown}{more}"
