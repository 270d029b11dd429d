"""The reports of `run` and of its dry run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.report.console import Part, duration, printed, warnings
from pipeline.report.drift import comparison_parts
from pipeline.report.progress import REUSE, shards
from pipeline.spec.gold import PublishSpec

if TYPE_CHECKING:
    from pipeline.verbs.forecast import Forecast
    from pipeline.verbs.run import RunResult

SAMPLE = 1_000  # documents to label for an estimate of the speed


@printed
def show_run(run: RunResult, *, spec_file: str = "SPEC") -> Iterator[Part]:
    """What was labelled, how fast, and whether and where it was published."""
    yield [*_facts(run)]
    if run.diff is not None:
        yield from ("", *comparison_parts(run.diff))
    if run.previous is not None or run.gates:
        yield ""
        yield {"verdict": _verdict(run)}
        passed = (decision.words for decision in run.gates if decision.passed)
        yield from (f"  {line}" for line in (*passed, *run.reasons))
    yield from warnings(run.warnings)
    if run.snapshot is not None:
        yield from ("", f"next: assay export {shlex.quote(spec_file)} --head 10")
    if run.missing_shards:
        ended = f"ended by {run.stopped}" if run.stopped else "incomplete"
        yield from ("", f"{ended}; {run.outcome.left}")


def _facts(run: RunResult) -> Iterator[tuple[str, str]]:
    """What was labelled, how fast, and where the output is."""
    documents = f"{run.documents:,} in {shards(run.shards)}"
    if run.limit is not None:
        documents = f"{run.documents_asked:,} of {documents} ({run.limit})"
    yield "documents", documents
    yield "labelled now", _labelled(run)
    if run.documents_undecided:
        why = "as a cast of a value or for lack of a column, so they are not asked about"
        yield "no verdict", f"a condition fails on {run.documents_undecided:,} documents: {why}"
    if run.documents_labelled:
        yield "status", _shares(run.status, run.documents_labelled)
        for task, labels in run.labels.items():
            yield f"  {task}", _shares(labels, run.answered[task]) or "no label applies"
        for task, stages in run.decided_by_stage.items():
            yield f"  {task} decided by stage", _shares(stages, sum(stages.values()))
        for task, skipped in run.skipped.items():
            yield f"  {task} skipped", f"{skipped:,}: its `when` is not true"
        yield "time", f"{run.seconds:.1f} s; workers labelled for {run.label_seconds:.1f} s"
        rate = run.documents_labelled / run.label_seconds if run.label_seconds else 0.0
        yield "speed", f"{rate:.2f} documents per second and worker"
        where = ("documents", "questions")
        if run.not_returned is not None:
            where = ("documents and prompts", "questions and answers")
            words = f"{run.not_returned:.2%} of an answer's probability, on average"
            yield "not returned", f"{words}: the server gives the 20 likeliest tokens"
        yield (
            "tokens read",
            f"{run.prefix_tokens_computed:,} in {where[0]}, "
            f"{run.question_tokens_computed:,} in {where[1]}",
        )
        if run.cost is not None:
            yield "cost", f"{run.cost:,.4g}"
    yield from ((f"  {task} cascade", own.words) for task, own in run.certificates.items())
    yield from (("left out", reason) for reason in run.unreadable)
    snapshot = "" if run.snapshot is None else f", snapshot {run.snapshot:08d}"
    yield "output", run.output + snapshot
    is_judged = run.outcome.job.spec.publish != PublishSpec()
    first = "without publish in the spec, " * is_judged
    if run.unreadable and run.snapshot is None and not run.missing_shards:
        why = f"{len(run.unreadable):,} of the files cannot be read"
        yield "not published", f"{why}; {first}--publish-partial publishes the others"
    if run.kept_snapshot is not None:
        why = f"snapshot {run.kept_snapshot:08d} shows more documents than this run and stays "
        yield "not published", f"{why}current; {first}--publish-partial publishes this run"


def _labelled(run: RunResult) -> str:
    """How many documents the model read, and how many kept their answers."""
    if not run.documents_labelled:
        return "0; every document has its answers" if run.complete else "0"
    words = f"{run.documents_labelled:,}; the model read {run.documents_read_by_model:,} of them"
    kept = f", and {run.documents_reused:,} kept the answers that their texts had"
    return words + kept * (run.documents_reused > 0)


def _verdict(run: RunResult) -> str:
    current = "there is no snapshot yet"
    if run.previous is not None:
        current = f"snapshot {run.previous:08d} stays current"
    if not run.complete:
        return f"incomplete, not compared; {current}; run again"
    if run.reasons:
        return f"REJECTED; {current}; to publish it, change the limits of publish in the spec"
    if not run.published:
        return f"not published; {current}"
    if run.snapshot == run.previous:
        return f"nothing new; {current}"
    return f"published as snapshot {run.snapshot:08d}"


def _shares(counted: Mapping[str, int], whole: int) -> str:
    """Each name with its share, the largest first."""
    largest = sorted(counted.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {_percent(count, whole)}" for name, count in largest)


def _percent(part: int, whole: int) -> str:
    """A share that is neither 0 % nor 100 % only by rounding."""
    share = part / whole
    return f"{share:.0%}" if share in (0, 1) or 0.01 <= share <= 0.99 else f"{share:.2%}"


@printed
def show_forecast(
    forecast: Forecast, *, spec_file: str = "SPEC", bounds: Sequence[str] = ()
) -> Iterator[Part]:
    """The counts, tokens, time and cost, and the options that may end the run before its end."""
    planned = forecast.plan
    missing = f"{forecast.missing_shards:,} of {forecast.shards:,} shards"
    rows = {
        "documents": f"{forecast.documents:,}",
        "not finished": f"{forecast.missing_documents:,} documents in {missing}",
    }
    if forecast.distinct_texts is not None:
        rows["different texts"] = f"{forecast.distinct_texts:,} in these"
    if planned.reuses:
        rows["read by the model"] = f"at most {planned.rows_for_model:,} documents; {REUSE}"
    # — of a shard whose accepted documents are not known, all rows count
    unknown = {work.shard.id for work in planned.work_items} - planned.inside.keys()
    if planned.limit is not None and unknown:
        rows["limit"] = f"{planned.limit}: the run labels only these documents of those shards"
    if forecast.tokens:
        rows["tokens"] = f"at most about {forecast.tokens:,.0f} in documents, "
        rows["tokens"] += f"{forecast.tokens_per_document:,.0f} per document, as labelled before"
    if forecast.server_tokens is not None:
        read, written = forecast.server_tokens
        rows["server"] = f"about {written:,.0f} requests with {read:,.0f} tokens in their prompts"
    rows["time"] = _time(forecast, spec_file)
    if forecast.cost is not None:
        rows["cost"] = f"at most about {forecast.cost:,.2f}"
        if forecast.server_tokens is not None and forecast.token_price is None:
            rows["cost"] += ", without the server's tokens: model.price is not known"
        if forecast.price is not None and forecast.seconds is None:
            rows["cost"] += ", without the hours of the workers: their speed is not known"
    if bounds:
        rows["may end before"] = f"{', '.join(bounds)}: exit code 3; the same command continues"
    yield rows


def _time(forecast: Forecast, spec_file: str) -> str:
    if not forecast.documents_for_model:
        return "no document needs the model"
    if forecast.seconds is None:
        sample = f"{100 * SAMPLE / max(forecast.documents, 2 * SAMPLE):.2g}%"
        command = f"assay run {shlex.quote(spec_file)} --sample {sample}"
        return f"not known yet; `{command}` labels a few documents, and the output has their speed"
    return (
        f"at most about {duration(forecast.seconds)} with the workers of the last run, which read "
        f"{forecast.docs_per_s:,.2f} documents a second"
    )
