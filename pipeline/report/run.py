"""The summary of a run, as a table and as JSON values.

Knows outcomes. Knows nothing of how they came about.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from pipeline.report.console import escape_controls
from pipeline.runtime.job import Plan
from pipeline.runtime.outcome import Outcome

if TYPE_CHECKING:
    from pipeline.verbs.plan import Estimate


def show_summary(outcome: Outcome, console: Console) -> None:
    """A short table, and one line that reads the output."""
    console.print(summary_table(outcome), markup=False)
    for task in list(outcome.tally.labels)[:1]:
        files = f"{outcome.output}/labels/{task}/*/*/*.parquet"
        python = min(os.path.relpath(sys.executable), sys.executable, key=len)
        told = f"\n{python} -c 'import duckdb; print(duckdb.read_parquet(\"{files}\"))'"
        console.print(told, markup=False)


def summary_table(outcome: Outcome) -> Table:
    """What was labelled, how fast, what reuse spared, where the output is."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in _lines(outcome):
        table.add_row(name, escape_controls(value))
    return table


def _lines(outcome: Outcome) -> list[tuple[str, str]]:
    tally = outcome.tally
    lines = [
        ("documents", f"{outcome.rows:,} in {outcome.shards:,} shards"),
        ("labelled now", f"{tally.rows:,}, the model read {tally.asked_rows:,}"),
    ]
    if tally.rows:
        rate = tally.rows / tally.label_seconds if tally.label_seconds else 0.0
        lines += [
            ("status", _shares(tally.status)),
            *((f"  {task}", _shares(labels)) for task, labels in tally.labels.items()),
            ("time", f"{outcome.seconds:.1f} s, labelling {tally.label_seconds:.1f} s"),
            ("documents a second", f"{rate:.2f} an actor while labelling"),
            ("prefix tokens", f"{tally.prefix_tokens_computed:,} computed"),
            ("question tokens", f"{tally.question_tokens_computed:,} computed"),
            ("tokens saved", f"{tally.tokens_saved:,} by reuse ({tally.reuse_ratio:.0%})"),
        ]
    return [*lines, *_whereabouts(outcome)]


def _whereabouts(outcome: Outcome) -> list[tuple[str, str]]:
    place = outcome.output
    if outcome.snapshot is not None:
        place += f", snapshot {outcome.snapshot:08d}"
    lines = [("output", place)]
    if outcome.missing_shards:
        missing = f"{outcome.missing_shards:,} shards are missing; run the command again"
        lines.insert(0, ("incomplete", missing))
    lines[:0] = [("left out", reason) for reason in outcome.unreadable]
    return lines


def _shares(counted: Counter[str]) -> str:
    whole = counted.total()
    shares = (f"{name} {count / whole:.0%}" for name, count in counted.most_common())
    return ", ".join(shares)


def summary_json(outcome: Outcome) -> dict[str, Any]:
    """The same figures for other programs."""
    tally = outcome.tally
    return {
        "complete": outcome.complete,
        "documents": outcome.rows,
        "shards": outcome.shards,
        "missing_shards": outcome.missing_shards,
        "unreadable": list(outcome.unreadable),
        "documents_labelled": tally.rows,
        "documents_read_by_model": tally.asked_rows,
        "objects_created": tally.created,
        "status": dict(tally.status),
        "labels": {task: dict(labels) for task, labels in tally.labels.items()},
        "seconds": outcome.seconds,
        "label_seconds": tally.label_seconds,
        "prefix_tokens_computed": tally.prefix_tokens_computed,
        "question_tokens_computed": tally.question_tokens_computed,
        "tokens_saved": tally.tokens_saved,
        "reuse_ratio": tally.reuse_ratio,
        "output": outcome.output,
        "snapshot": outcome.snapshot,
    }


def announced(planned: Plan) -> str:
    """One line before the work begins."""
    if not planned.work_items:
        return f"nothing to do: {planned.rows:,} documents in {len(planned.shards):,} shards"
    return (
        f"{planned.missing_rows:,} of {planned.rows:,} documents to label, in "
        f"{planned.missing_shards:,} of {len(planned.shards):,} shards"
    )


def plan_json(planned: Plan) -> dict[str, int]:
    """Counts of what there is and of what is missing."""
    return {
        "documents": planned.rows,
        "shards": len(planned.shards),
        "missing_documents": planned.missing_rows,
        "missing_shards": planned.missing_shards,
        "missing_cells": sum(work.shard.rows * len(work.tasks) for work in planned.work_items),
    }


def plan_table(planned: Plan) -> Table:
    """The same for people."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in plan_json(planned).items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    return table


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """The counts, and the time and the cost of the labelling."""
    return plan_json(estimate.plan) | {
        "documents_for_model": estimate.documents,
        "parts": [asdict(part) for part in estimate.parts],
        "measured": asdict(estimate.measured) if estimate.measured else None,
        "worker_seconds": estimate.worker_seconds,
        "workers": estimate.workers,
        "seconds": estimate.seconds,
        "price": estimate.price,
        "cost": estimate.cost,
    }


def estimate_table(estimate: Estimate) -> Table:
    """The same for people."""
    table = plan_table(estimate.plan)
    if not estimate.parts:
        table.add_row("time", "no document needs the model")
        return table
    for part in estimate.parts:
        told = f"at most {part.documents:,} documents, {part.seconds_per_document:.3g} s each"
        table.add_row("model", escape_controls(f"{told}: {', '.join(part.tasks)}"))
    if found := estimate.measured:
        told = f"on {found.documents:,} documents of {found.tokens_per_document:,.0f} tokens"
        table.add_row("measured", f"{told}, {found.dtype} on {found.device} here")
    workers = "1 worker" if estimate.workers == 1 else f"{estimate.workers:,} workers"
    table.add_row("time", f"about {_duration(estimate.seconds)} of {workers}, beside their start")
    if estimate.cost is not None:
        hours = estimate.worker_seconds / 3600
        table.add_row("cost", f"about {estimate.cost:,.2f}, for {hours:,.2f} worker hours")
    return table


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return str(timedelta(seconds=round(seconds)))  # 2 days, 3:04:05
