"""A run that publishes its labels only if they pass the rules of the spec's `publish`.

Entry point: `judged_run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import computed_field

from pipeline.errors import Problem, SpecError, option_error
from pipeline.evaluation.gates import Decision
from pipeline.fitted.certificate import Certificate
from pipeline.gold.labels import read_gold
from pipeline.integrity.diff import Comparison, compare, exceeded
from pipeline.ledger.counts import Counts
from pipeline.ledger.snapshots import Contents, contents, last_snapshot
from pipeline.options import EvalOptions, RunOptions
from pipeline.runtime.job import Run
from pipeline.runtime.outcome import Outcome
from pipeline.runtime.progress import PUBLISHING, Display, Progress, ignore
from pipeline.runtime.run import label
from pipeline.spec.gold import PublishSpec
from pipeline.spec.parse import with_cascades
from pipeline.spec.schema import JobSpec
from pipeline.verbs import ForPeople
from pipeline.verbs.certify import certify
from pipeline.verbs.doubts import label_doubts
from pipeline.verbs.evaluate import evaluate, parse_gates, why_not_judged

Gate = Callable[[Contents], tuple[Decision, ...]]  # decides on an unpublished snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended, and why its labels were published or not."""

    outcome: ForPeople[Outcome]
    complete: bool
    documents: int
    shards: int
    missing_shards: int
    missing_documents: int
    stopped: str | None  # the option that ended the run before it was complete
    limit: str | None
    documents_asked: int | None
    documents_undecided: int  # not asked about, because a condition cannot be computed on them
    skipped: Mapping[str, int]  # by task: documents that its condition does not accept
    kept_snapshot: int | None  # stays current, because it shows more documents than this run asked
    unreadable: tuple[str, ...]
    failed_shards: tuple[str, ...]
    documents_labelled: int
    documents_read_by_model: int
    documents_reused: int  # with the answers of equal texts
    objects_created: int
    status: Mapping[str, int]  # documents
    answered: Mapping[str, int]  # by task
    labels: Mapping[str, Mapping[str, int]]  # by task and label; a document may have several
    decided_by_stage: Mapping[str, Mapping[str, int]]  # by task, by stage of its cascade
    certificates: Mapping[str, Certificate]  # by task with a cascade: what was proved
    seconds: float  # with those of a cascade's sample, as the figures up to the cost
    label_seconds: float  # the sum over workers
    prefix_tokens_computed: int
    question_tokens_computed: int
    cost: float | None  # that the model's server took, by model.price
    # Mean probability of an answer that the server did not return; None without a server.
    not_returned: float | None
    output: str
    snapshot: int | None
    previous: int | None = None  # the snapshot that it was compared with
    reasons: tuple[str, ...] = ()  # not published if there are any
    gates: tuple[Decision, ...] = ()
    diff: Comparison | None = None

    @classmethod
    def of(cls, outcome: Outcome, sampled: Counts | None = None) -> RunResult:
        """The counts of a run, which was not judged; of a cascade's sample the cost and times."""
        n, server = outcome.tally.n, outcome.job.spec.server
        requests, spent = n.total_of("requests"), Counts(n + (sampled or Counts()))
        cost = None
        if server is not None and server.price is not None:
            tokens = map(spent.total_of, ("prompt_tokens", "answer_tokens"))
            cost = server.price.of(*tokens)
        return cls(
            outcome=outcome,
            complete=outcome.complete,
            documents=outcome.rows,
            shards=outcome.shards,
            missing_shards=outcome.missing_shards,
            missing_documents=outcome.missing_rows,
            stopped=outcome.stopped,
            limit=outcome.limit,
            documents_asked=outcome.asked,
            documents_undecided=n["undecided",],
            skipped=n.by("skipped"),
            kept_snapshot=outcome.kept,
            unreadable=outcome.unreadable,
            failed_shards=outcome.failed_shards,
            documents_labelled=n.total_of("rows"),
            documents_read_by_model=n.asked,
            documents_reused=n["reused",],
            objects_created=n["created",],
            status=n.by("rows"),
            answered=n.by("answered"),
            labels=n.labels,
            certificates=outcome.certificates,
            decided_by_stage={task: n.by("decided", task) for task in n.by("decided")},
            seconds=outcome.seconds,
            label_seconds=spent.total_of("label_ms") / 1_000,
            prefix_tokens_computed=spent.total_of("prefix_tokens"),
            question_tokens_computed=spent.total_of("question_tokens"),
            cost=cost,
            not_returned=n.total_of("not_returned") / 1e6 / requests if requests else None,
            output=outcome.output,
            snapshot=outcome.snapshot,
        )

    @computed_field
    @property
    def published(self) -> bool:
        """Whether a snapshot shows the labels of this run."""
        return self.snapshot is not None

    @computed_field
    @property
    def warnings(self) -> tuple[str, ...]:
        """Each reason why the labels may be meaningless."""
        return tuple(label_doubts(self.labels, self.answered))


def judged_run(
    spec: JobSpec,
    *,
    cache_dir: Path,
    address: str | None = None,
    options: RunOptions = RunOptions(),
    announce: Callable[[Progress], None] = ignore,
) -> RunResult:
    """Labels missing documents and publishes a snapshot if all of the spec's `publish` holds.

    Otherwise the previous snapshot stays current. Labels are kept in any case, so the next run
    does not compute them again. SpecError for wrong gold, gates or options, before any work.
    """
    own = Run()
    spec = with_cascades(spec) if options.save else spec
    gated = _has_gates(spec, options)
    sampled = certify(
        spec, cache_dir=cache_dir, address=address, options=options, announce=announce, part_of=own
    )

    def decide(candidate: Contents) -> tuple[Decision, ...]:
        return evaluate(spec, EvalOptions(), cache_dir=cache_dir, candidate=candidate).gates

    with label(
        spec, cache_dir=cache_dir, address=address, options=options, announce=announce, part_of=own
    ) as labelled:
        if labelled.complete or options.publish_partial:
            Display("the progress")(announce, Progress(PUBLISHING))
        if spec.publish == PublishSpec():
            return RunResult.of(labelled.published(partial=options.publish_partial), sampled)
        return judge(labelled, decide if gated else None, spec.publish, sampled)


def _has_gates(spec: JobSpec, options: RunOptions) -> bool:
    """Whether a spec has gates; SpecError unless its gold can judge each, or for a wrong option."""
    if options.publish_partial and spec.publish != PublishSpec():
        fix = "publishes labels that were not judged; leave it out, or remove publish from the spec"
        raise option_error("publish_partial", fix)
    if options.max_cost is not None and (spec.server is None or spec.server.price is None):
        fix = "needs the price of tokens; write price: {input: 1, output: 2} in the server's model"
        raise option_error("max_cost", fix, options.max_cost)
    if gates := parse_gates(spec):
        gold = read_gold(None, spec)
        reasons = [why_not_judged(gate, gold) for gate in gates]
        if problems := [
            Problem(f"publish.gates.{number}", reason, gates[number].written)
            for number, reason in enumerate(reasons)
            if reason
        ]:
            raise SpecError(problems)
    return bool(gates)


def judge(
    labelled: Outcome, gate: Gate | None, limits: PublishSpec, sampled: Counts | None = None
) -> RunResult:
    """Compares the labelled output with the previous snapshot, and publishes or rejects it."""
    previous = last_snapshot(labelled.store, labelled.job.spec.name)
    if not labelled.complete:
        return replace(RunResult.of(labelled, sampled), previous=previous)
    candidate = labelled.contents
    gates = gate(candidate) if gate else ()
    comparison = None
    if previous is not None:
        before = contents(labelled.store, previous)
        if set(before.tasks) & set(candidate.tasks):
            comparison = compare(labelled.store, before, candidate)
    reasons = tuple(decision.words for decision in gates if not decision.passed)
    if comparison:
        reasons += exceeded(comparison, limits)
    outcome = labelled if reasons else labelled.published(partial=False)
    result = RunResult.of(outcome, sampled)
    return replace(result, previous=previous, reasons=reasons, gates=gates, diff=comparison)
