"""One scheduled run: labels new documents, and publishes them if gates pass and nothing drifted.

Entry point: `scheduled_run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import Problem, SpecError
from pipeline.evaluation.gates import Decision
from pipeline.gold.labels import read_gold
from pipeline.integrity.diff import Comparison, compare, exceeded
from pipeline.ledger.snapshots import Contents, contents, last_snapshot
from pipeline.options import EvalOptions, GoldOptions, Limits
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.progress import Progress
from pipeline.runtime.run import label
from pipeline.spec.schema import JobSpec
from pipeline.verbs.evaluate import evaluate, parse_gates

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
    gold: str | None,
    gold_options: GoldOptions,
    gates: tuple[str, ...],
    limits: Limits,
    *,
    cache_dir: Path,
    address: str | None,
    announce: Callable[[Progress], None],
) -> ScheduledRun:
    """Labels missing documents and publishes a snapshot if gates and limits hold.

    Otherwise the previous snapshot stays current. Labels are kept in any case, so the next run
    does not compute them again. SpecError for wrong gold or gates, before any work.
    """
    if gates and gold is None:
        raise SpecError([Problem("--gold", "missing; a gate needs gold labels: --gold FILE")])
    if gold is not None:
        if not gates:
            raise SpecError([Problem("--gate", "missing; --gold judges nothing without a gate")])
        parse_gates(gates, read_gold(gold, spec, gold_options), spec)

    def decide(candidate: Contents) -> tuple[Decision, ...]:
        assert gold is not None
        of_gates = EvalOptions(gates=gates)
        judged = evaluate(
            spec, gold, gold_options, of_gates, cache_dir=cache_dir, candidate=candidate
        )
        return judged.decisions

    with label(spec, cache_dir=cache_dir, address=address, announce=announce) as labelled:
        return judge(labelled, decide if gates else None, limits)


def judge(labelled: Outcome, gate: Gate | None, limits: Limits) -> ScheduledRun:
    """Compares the labelled output with the previous snapshot, and publishes or rejects it."""
    previous = last_snapshot(labelled.store, labelled.job.spec.name)
    if not labelled.complete:
        return ScheduledRun(labelled, previous, None, (), ())
    candidate = labelled.contents
    decisions = gate(candidate) if gate else ()
    comparison = None
    if previous is not None:
        before = contents(labelled.store, previous)
        if set(before.tasks) & set(candidate.tasks):
            comparison = compare(labelled.store, before, candidate)
    rejected = tuple(
        f"gate {each.gate} fails: the value is "
        f"{'undefined' if each.value is None else format(each.value, '.4f')}"
        for each in decisions
        if not each.passed
    )
    if comparison:
        rejected += exceeded(comparison, limits)
    number = None if rejected else labelled.publish()
    return ScheduledRun(
        replace(labelled, snapshot=number), previous, comparison, decisions, rejected
    )
