"""A run that publishes its labels only if gates pass and no task drifts. Entry: `judged_run`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import option_error
from pipeline.evaluation.gates import Decision
from pipeline.gold.labels import read_gold
from pipeline.integrity.diff import Comparison, compare, exceeded
from pipeline.ledger.snapshots import Contents, contents, last_snapshot
from pipeline.options import EvalOptions, GoldOptions, Limits, RunOptions
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.progress import Progress, ignore
from pipeline.runtime.run import label
from pipeline.spec.schema import JobSpec
from pipeline.verbs.evaluate import evaluate, parse_gates

Gate = Callable[[Contents], tuple[Decision, ...]]  # decides on an unpublished snapshot


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """The result of a run with gates or limits."""

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
    gold: str | None,
    gold_options: GoldOptions,
    limits: Limits,
    *,
    cache_dir: Path,
    address: str | None = None,
    options: RunOptions = RunOptions(),
    announce: Callable[[Progress], None] = ignore,
) -> JudgedRun:
    """Labels missing documents and publishes a snapshot if all gates and limits hold.

    Otherwise the previous snapshot stays current. Labels are kept in any case, so the next run
    does not compute them again. SpecError for wrong gold, gates or options, before any work.
    """
    if options.publish_partial:
        fix = "publishes labels that were not judged; leave it out, or the gates and limits"
        raise option_error("publish_partial", fix)
    if limits.gates and gold is None:
        raise option_error("gold", "missing; a gate needs gold labels: --gold FILE")
    if gold is not None:
        if not limits.gates:
            raise option_error("gates", "missing; --gold judges nothing without a gate")
        parse_gates(limits.gates, read_gold(gold, spec, gold_options), spec)

    def decide(candidate: Contents) -> tuple[Decision, ...]:
        assert gold is not None
        by_gates = EvalOptions(gates=limits.gates)
        return evaluate(
            spec, gold, gold_options, by_gates, cache_dir=cache_dir, candidate=candidate
        ).decisions

    with label(
        spec, cache_dir=cache_dir, address=address, options=options, announce=announce
    ) as labelled:
        return judge(labelled, decide if limits.gates else None, limits)


def judge(labelled: Outcome, gate: Gate | None, limits: Limits) -> JudgedRun:
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
