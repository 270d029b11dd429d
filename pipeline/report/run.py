"""The reports of `run` and of its dry run: tables for people, JSON values."""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeline.report.console import Part, duration, printed, warnings
from pipeline.report.doubts import label_doubts
from pipeline.report.progress import REUSE

if TYPE_CHECKING:
    from pipeline.runtime.outcome import Outcome
    from pipeline.verbs.forecast import Forecast

SAMPLE = 1_000  # documents to label, to know the speed


@printed
def show_summary(outcome: Outcome) -> Iterator[Part]:
    """What was labelled, how fast, where, how to read the snapshot, and at the end what is left."""
    yield [*summary_facts(outcome)]
    yield from warnings(label_doubts(outcome.tally.n.labels, outcome.tally.n.by("answered")))
    if outcome.snapshot is not None:
        command = _reading_command(outcome.output, outcome.job.spec.storage_options)
        yield from ("", "to read the labels:", command)
    if outcome.missing_shards:
        ended = f"ended by {outcome.stopped}" if outcome.stopped else "incomplete"
        yield from ("", f"{ended}; {outcome.left}")


def summary_facts(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """What was labelled, how fast, and where the output is."""
    n = outcome.tally.n
    rows, seconds = n.total_of("rows"), n.total_of("label_ms") / 1_000
    documents = f"{outcome.rows:,} in {outcome.shards:,} shard{'s' * (outcome.shards != 1)}"
    if outcome.limit is not None:
        documents = f"{outcome.asked:,} of {documents} ({outcome.limit})"
    yield "documents", documents
    yield "labelled now", f"{rows:,}; the model read {n.asked:,} of them"
    if n["undecided",]:
        why = "as a cast of a value or for lack of a column, so they are not asked about"
        yield "no verdict", f"a condition fails on {n['undecided',]:,} documents: {why}"
    if n["reused",]:
        yield "reused", f"{n['reused',]:,} answers of other shards with equal texts"
    if rows:
        yield "status", _shares(n.by("rows"), rows)
        for task, labels in n.labels.items():
            yield f"  {task}", _shares(labels, n["answered", task]) or "no label applies"
        for task in n.by("decided"):
            yield f"  {task} decided", _stages(n.by("decided", task))
        for task, skipped in n.by("skipped").items():
            yield f"  {task} skipped", f"{skipped:,}: its `when` is not true"
        yield "time", f"{outcome.seconds:.1f} s; workers labelled for {seconds:.1f} s"
        rate = rows / seconds if seconds else 0.0
        yield "speed", f"{rate:.2f} documents per second and worker"
        yield (
            "tokens read",
            f"{n.total_of('prefix_tokens'):,} in instructions and documents, "
            f"{n.total_of('question_tokens'):,} in questions",
        )
    yield from (("left out", reason) for reason in outcome.unreadable)
    snapshot = "" if outcome.snapshot is None else f", snapshot {outcome.snapshot:08d}"
    yield "output", outcome.output + snapshot
    if outcome.unreadable and outcome.snapshot is None and not outcome.plan.work_items:
        why = f"{len(outcome.unreadable):,} of the files cannot be read"
        yield "not published", f"{why}; --publish-partial publishes the others"
    if outcome.kept is not None:
        why = f"snapshot {outcome.kept:08d} shows more documents than this run and stays current"
        yield "not published", f"{why}; --publish-partial publishes this run"


def _stages(decided: Counter[str]) -> str:
    """What each stage of a cascade decided."""
    total = decided.total()
    parts = (f"by stage {n} {rows:,} ({rows / total:.0%})" for n, rows in sorted(decided.items()))
    return ", ".join(parts)


def _reading_command(output: str, storage_options: Mapping[str, Any]) -> str:
    options = f", storage_options={dict(storage_options)!r}" if storage_options else ""
    code = (
        f"import duckdb, pipeline; labels = pipeline.open_labels({output!r}{options}); "
        "print(duckdb.sql('select * from labels'))"
    )
    python = sys.executable
    with suppress(FileNotFoundError):  # — Ray deletes a submitted job's folder when its run ends
        python = min(os.path.relpath(python), python, key=len)
    quoted = shlex.quote(code) if set(code) & set('"$`\\!') else f'"{code}"'
    return f"{shlex.quote(python)} -c {quoted}"


def _shares(counted: Counter[str], rows: int) -> str:
    shares = (f"{name} {n / rows:.0%}" for name, n in counted.most_common())
    return ", ".join(shares)


@dataclass(frozen=True, slots=True)
class SummaryJson:
    """How a run ended, for other programs."""

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
    failed_shards: tuple[str, ...]  # reasons
    documents_labelled: int
    documents_read_by_model: int
    documents_reused: int
    objects_created: int
    status: Mapping[str, int]
    labels: Mapping[str, Mapping[str, int]]  # by task
    decided_by_stage: Mapping[str, Mapping[str, int]]  # by task with a cascade
    warnings: tuple[str, ...]
    seconds: float
    label_seconds: float  # of all workers
    prefix_tokens_computed: int
    question_tokens_computed: int
    output: str
    snapshot: int | None


def summary_json(outcome: Outcome) -> SummaryJson:
    """The same figures for other programs."""
    n = outcome.tally.n
    return SummaryJson(
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
        labels=n.labels,
        decided_by_stage={task: n.by("decided", task) for task in n.by("decided")},
        warnings=tuple(label_doubts(n.labels, n.by("answered"))),
        seconds=outcome.seconds,
        label_seconds=n.total_of("label_ms") / 1_000,
        prefix_tokens_computed=n.total_of("prefix_tokens"),
        question_tokens_computed=n.total_of("question_tokens"),
        output=outcome.output,
        snapshot=outcome.snapshot,
    )


@printed
def show_forecast(
    forecast: Forecast, *, spec_file: str = "SPEC", bounds: Sequence[str] = ()
) -> Iterator[Part]:
    """The counts, tokens, time and cost, and the options that may end the run before its end."""
    planned = forecast.plan
    names = {"missing_cells": "answers to compute", "missing_shards": "shards to label"}
    names["missing_documents"] = "documents to label"
    names["distinct_texts"] = "different texts in these"
    counts = asdict(planned.counts).items()
    rows = {names.get(name, name): f"{value:,}" for name, value in counts if value is not None}
    # — shards whose accepted documents are not known count with all of their rows
    unknown = {work.shard.id for work in planned.work_items} - planned.inside.keys()
    if planned.limit is not None and unknown:
        rows["limit"] = f"{planned.limit}: the run labels only these documents of those shards"
    if planned.reuses:
        rows["read by the model"] = f"at most {planned.rows_for_model:,} documents; {REUSE}"
    if forecast.tokens:
        rows["tokens"] = f"at most about {forecast.tokens:,.0f} in documents, "
        rows["tokens"] += f"{forecast.tokens_per_document:,.0f} in each as in those labelled"
    rows["time"] = _time(forecast, spec_file)
    if forecast.cost is not None:
        rows["cost"] = f"at most about {forecast.cost:,.2f}"
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
