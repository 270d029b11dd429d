"""One scheduled run: labels new documents, and publishes them if gates pass and nothing drifted.

Entry point: `scheduled_run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.audit.diff import Comparison, compare
from pipeline.evaluation.gates import Decision
from pipeline.ledger.snapshots import Contents, contents, last_snapshot
from pipeline.options import Limits
from pipeline.runtime.job import Plan
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.run import LabelledOutput, Progress, label
from pipeline.spec.schema import JobSpec

Gate = Callable[[Contents], tuple[Decision, ...]]  # decides on an unpublished snapshot


@dataclass(frozen=True, slots=True)
class ScheduledRun:
    """The result of a scheduled run."""

    outcome: Outcome
    previous: int | None  # number of the snapshot that it was compared with
    comparison: Comparison | None  # None: no previous snapshot, or documents are missing
    decisions: tuple[Decision, ...]  # of the gates
    rejected: tuple[str, ...]  # reasons; not published if there are any

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
    """Labels missing documents and publishes a snapshot if gates and limits hold.

    Otherwise the previous snapshot stays current. Labels are kept in any case, so the next run
    does not compute them again.
    """
    labelled = label(spec, cache_dir=cache_dir, address=address, announce=announce)
    return judge(labelled, gate, limits or Limits())


def judge(labelled: LabelledOutput, gate: Gate | None, limits: Limits) -> ScheduledRun:
    """Compares the labelled output with the previous snapshot, and publishes or rejects it."""
    previous = last_snapshot(labelled.store, labelled.job.spec.name)
    if not labelled.complete:
        return ScheduledRun(labelled.outcome(None), previous, None, (), ())
    candidate = labelled.contents
    decisions = gate(candidate) if gate else ()
    comparison = None
    if previous is not None:
        before = contents(labelled.store, previous)
        if set(before.tasks) & set(candidate.tasks):
            comparison = compare(labelled.store, before, candidate)
    rejected = (*_failed(decisions), *(_drifted(comparison, limits) if comparison else ()))
    number = None if rejected else labelled.publish()
    return ScheduledRun(labelled.outcome(number), previous, comparison, decisions, rejected)


def _failed(decisions: tuple[Decision, ...]) -> tuple[str, ...]:
    return tuple(
        f"gate {each.gate} fails: the value is "
        f"{'undefined' if each.value is None else format(each.value, '.4f')}"
        for each in decisions
        if not each.passed
    )


def _drifted(comparison: Comparison, limits: Limits) -> tuple[str, ...]:
    """A reason for each limit that a task exceeds; only tasks of both snapshots are compared."""
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
                f"{change.newly_failing:,} rows of {change.task} had an answer and fail now: "
                f"{failing:.2%} of all is above {limits.max_failing:.2%}"
            )
    return tuple(reasons)
