"""A run that publishes its labels only if what the spec says of that holds.

Entry point: `judged_run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import Problem, SpecError, option_error
from pipeline.evaluation.gates import Decision
from pipeline.gold.labels import read_gold
from pipeline.integrity.diff import Comparison, compare, exceeded
from pipeline.ledger.snapshots import Contents, contents, last_snapshot
from pipeline.options import EvalOptions, RunOptions
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.progress import Progress, ignore
from pipeline.runtime.run import label
from pipeline.spec.gold import PublishSpec
from pipeline.spec.schema import JobSpec
from pipeline.verbs.evaluate import evaluate, parse_gates, why_not_judged

Gate = Callable[[Contents], tuple[Decision, ...]]  # decides on an unpublished snapshot


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """The result of a run whose spec says what must hold to publish."""

    outcome: Outcome
    previous: int | None  # number of the snapshot that it was compared with
    comparison: Comparison | None  # None: no previous snapshot, or documents are missing
    decisions: tuple[Decision, ...]  # of the gates
    rejected: tuple[str, ...]  # reasons; not published if there are any

    @property
    def published(self) -> bool:
        return self.outcome.snapshot is not None


def judged_run(
    spec: JobSpec,
    *,
    cache_dir: Path,
    address: str | None = None,
    options: RunOptions = RunOptions(),
    announce: Callable[[Progress], None] = ignore,
) -> JudgedRun:
    """Labels missing documents and publishes a snapshot if all of the spec's `publish` holds.

    Otherwise the previous snapshot stays current. Labels are kept in any case, so the next run
    does not compute them again. SpecError for wrong gold, gates or options, before any work.
    """
    if options.publish_partial:
        fix = "publishes labels that were not judged; leave it out, or remove publish from the spec"
        raise option_error("publish_partial", fix)
    if gates := parse_gates(spec):
        gold = read_gold(None, spec)
        reasons = [why_not_judged(gate, gold) for gate in gates]
        if problems := [
            Problem(f"publish.gates.{number}", reason, gates[number].written)
            for number, reason in enumerate(reasons)
            if reason
        ]:
            raise SpecError(problems)

    def decide(candidate: Contents) -> tuple[Decision, ...]:
        return evaluate(spec, EvalOptions(), cache_dir=cache_dir, candidate=candidate).gates

    with label(
        spec, cache_dir=cache_dir, address=address, options=options, announce=announce
    ) as labelled:
        return judge(labelled, decide if gates else None, spec.publish)


def judge(labelled: Outcome, gate: Gate | None, limits: PublishSpec) -> JudgedRun:
    """Compares the labelled output with the previous snapshot, and publishes or rejects it."""
    previous = last_snapshot(labelled.store, labelled.job.spec.name)
    if not labelled.complete:
        return JudgedRun(labelled, previous, None, (), ())
    candidate = labelled.contents
    decisions = gate(candidate) if gate else ()
    comparison = None
    if previous is not None:
        before = contents(labelled.store, previous)
        if set(before.tasks) & set(candidate.tasks):
            comparison = compare(labelled.store, before, candidate)
    rejected = tuple(
        f"gate {decision.gate} fails: the value is "
        f"{'undefined' if decision.value is None else format(decision.value, '.4f')}"
        for decision in decisions
        if not decision.passed
    )
    if comparison:
        rejected += exceeded(comparison, limits)
    outcome = labelled if rejected else labelled.published(partial=False)
    return JudgedRun(outcome, previous, comparison, decisions, rejected)
