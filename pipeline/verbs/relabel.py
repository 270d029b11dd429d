"""One tick of a schedule: label what is new, and publish it only if it is good and did not drift.

Knows the order of a tick and its limits. Knows nothing of when ticks come, or of how a tick is
shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.audit.diff import Comparison, compare
from pipeline.evaluation.gates import Decision
from pipeline.ledger.contents import Contents, contents
from pipeline.ledger.snapshots import last_snapshot
from pipeline.options import Limits
from pipeline.runtime.job import Plan
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.run import LabelledOutput, Progress, label
from pipeline.spec.schema import JobSpec

Gate = Callable[[Contents], tuple[Decision, ...]]  # judges what is not published yet


@dataclass(frozen=True, slots=True)
class ScheduledRun:
    """How a tick ended."""

    outcome: Outcome
    previous: int | None  # the snapshot it was compared with
    comparison: Comparison | None  # None: there was none before, or not everything is labelled
    decisions: tuple[Decision, ...]  # of the gates
    rejected: tuple[str, ...]  # why it is not published

    @property
    def published(self) -> bool:
        return self.outcome.snapshot is not None


def scheduled_run(
    spec: JobSpec,
    *,
    cache_dir: Path,
    address: str | None = None,
    gate: Gate | None = None,
    limits: Limits | None = None,
    announce: Callable[[Plan], Progress],
) -> ScheduledRun:
    """Labels what is missing and publishes it if gates and limits hold; else the last stays.

    What is labelled is kept in any case, so the next tick does none of it again.
    """
    done = label(spec, cache_dir=cache_dir, address=address, announce=announce)
    return judge(done, gate, limits or Limits())


def judge(done: LabelledOutput, gate: Gate | None, limits: Limits) -> ScheduledRun:
    """The second half of a tick: what was labelled is compared, judged, and published or not."""
    previous = last_snapshot(done.store, done.job.spec.name)
    if not done.complete:
        return ScheduledRun(done.outcome(None), previous, None, (), ())
    candidate = done.contents
    decisions = gate(candidate) if gate else ()
    comparison, common = None, set[str]()
    if previous is not None:
        before = contents(done.store, previous)
        common = set(before.tasks) & set(candidate.tasks)
        comparison = compare(done.store, before, candidate) if common else None
    rejected = (*_failed(decisions), *(_drifted(comparison, limits) if comparison else ()))
    number = None if rejected else done.publish()
    return ScheduledRun(done.outcome(number), previous, comparison, decisions, rejected)


def _failed(decisions: tuple[Decision, ...]) -> tuple[str, ...]:
    return tuple(
        f"gate {each.gate} does not hold: it is "
        f"{'undefined' if each.value is None else format(each.value, '.4f')}"
        for each in decisions
        if not each.passed
    )


def _drifted(comparison: Comparison, limits: Limits) -> tuple[str, ...]:
    """A reason for each limit that a task is above; tasks that only one side has have none."""
    reasons = []
    for change in comparison.tasks:
        if change.psi > limits.max_psi:
            reasons.append(
                f"the labels of {change.task} shifted: PSI {change.psi:.4f} is above "
                f"{limits.max_psi:g}"
            )
        if change.flip_rate > limits.max_flip_rate:
            reasons.append(
                f"the answers of {change.task} flipped: {change.flip_rate:.2%} of the shared texts "
                f"is above {limits.max_flip_rate:.2%}"
            )
        failing = change.newly_failing / max(1, comparison.rows[1])
        if failing > limits.max_failing:
            reasons.append(
                f"{change.newly_failing:,} rows of {change.task} fail that had an answer: "
                f"{failing:.2%} of all is above {limits.max_failing:.2%}"
            )
    return tuple(reasons)
