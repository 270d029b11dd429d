"""The figures of a bench, for people and as JSON values.

Knows figures. Knows nothing of how they were measured.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.table import Table

from pipeline.bench import Bench


def bench_table(measured: Bench) -> Table:
    """One line a method, with the machine above and what the shares mean below."""
    machine = measured.machine
    table = Table(
        title=f"{machine.processor}, {machine.threads} threads, {machine.dtype} on "
        f"{machine.device}, torch {machine.torch}",
        caption=f"matmul share: the tree's arithmetic in this time, of the rate that plain "
        f"products reach here, {measured.matmul_flops / 1e9:,.0f} GFLOP/s at best",
    )
    for name in ("method", "s / document", "docs / s", "x tree", "peak MB", "matmul share"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for workload, rows in groupby(measured.rows, key=lambda row: row.workload):
        table.add_section()
        table.add_row(f"[bold]{workload}[/bold]")
        for row in rows:
            table.add_row(
                row.method,
                f"{row.seconds_per_document:.2f}",
                f"{row.docs_per_s:.3f}",
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
        "rows": [{**asdict(row), "docs_per_s": row.docs_per_s} for row in measured.rows],
    }
