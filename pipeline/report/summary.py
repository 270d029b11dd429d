"""The summary of a run, as a table and as JSON values.

Knows outcomes. Knows nothing of how they came about.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.data.job import Plan
from pipeline.data.run import Outcome
from pipeline.report.printable import printable


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
        table.add_row(name, printable(value))
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
    if not planned.works:
        return f"nothing to do: {planned.rows:,} documents in {len(planned.shards):,} shards"
    return (
        f"{planned.missing_rows:,} of {planned.rows:,} documents to label, in "
        f"{planned.missing_shards:,} of {len(planned.shards):,} shards"
    )
