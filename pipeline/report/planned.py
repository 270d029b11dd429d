"""What a run would do, and what it would take, as a table and as JSON values.

Knows plans and estimates. Knows nothing of how they came about.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pipeline.data.job import Plan
from pipeline.report.printable import printable

if TYPE_CHECKING:
    from pipeline.planning import Estimate  # brings torch, which a dry run does without


def plan_json(planned: Plan) -> dict[str, int]:
    """Counts of what there is and of what is missing."""
    return {
        "documents": planned.rows,
        "shards": len(planned.shards),
        "missing_documents": planned.missing_rows,
        "missing_shards": planned.missing_shards,
        "missing_cells": sum(work.shard.rows * len(work.tasks) for work in planned.works),
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
        table.add_row("model", printable(f"{told}: {', '.join(part.tasks)}"))
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
