"""The figures of a bench, for people and as JSON values.

Knows figures. Knows nothing of how they were measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Group
from rich.table import Table

from pipeline.verbs.bench import Bench, Row


def bench_tables(measured: Bench) -> Group:
    """A table a workload, with the machine above and what the shares mean below."""
    machine = measured.machine
    weights = "" if machine.quantize == "none" else f", {machine.quantize} weights"
    return Group(
        f"{machine.processor}, {machine.threads} threads, {machine.dtype}{weights} on "
        f"{machine.device}, torch {machine.torch}",
        *(_table(name, rows) for name, rows in groupby(measured.rows, key=lambda r: r.workload)),
        "tokens: the documents' own; share: the tree's arithmetic in this time, of the rate that "
        f"plain products reach here, {measured.matmul_flops / 1e9:,.0f} GFLOP/s at best",
    )


def _table(workload: str, rows: Iterable[Row]) -> Table:
    table = Table(title=workload, title_justify="left")
    for name in ("method", "s / document", "docs / s", "tokens / s", "x tree", "peak MB", "share"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.method,
            f"{row.seconds_per_document:.2f}",
            f"{row.docs_per_s:.3f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.times_tree:.2f}",
            f"{row.peak_bytes / 1e6:,.0f}",
            f"{row.matmul_share:.0%}",
        )
    return table


def bench_json(measured: Bench) -> dict[str, Any]:
    """The form that other programs read (DESIGN, section 7)."""
    return {
        "machine": asdict(measured.machine),
        "matmul_flops": measured.matmul_flops,
        "rows": [
            {**asdict(row), "docs_per_s": row.docs_per_s, "tokens_per_s": row.tokens_per_s}
            for row in measured.rows
        ],
    }
