"""The figures of a bench, for people and as JSON values.

Knows figures. Knows nothing of how they were measured.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from pipeline.bench import Bench


def bench_table(measured: Bench) -> Table:
    """One line a method, with the machine above and what the shares mean below."""
    machine = measured.machine
    weights = "" if machine.quantize == "none" else f" with {machine.quantize} weights"
    table = Table(
        title=f"{machine.processor}, {machine.threads} threads, {machine.dtype}{weights} on "
        f"{machine.device}, torch {machine.torch}; {measured.rows[0].workload}",
        caption=f"matmul share: the tree's arithmetic in this time, of the "
        f"{measured.matmul_flops / 1e9:,.0f} GFLOP/s that plain products reach here",
    )
    for name in ("method", "s / document", "docs / s", "x tree", "peak MB", "matmul share"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in measured.rows:
        table.add_row(
            row.method,
            f"{row.seconds_per_document:.2f}",
            f"{row.docs_per_s:.3f}",
            f"{measured.ratios.get(row.method, 1.0):.2f}",
            f"{row.peak_bytes / 1e6:,.0f}",
            f"{row.matmul_share:.0%}",
        )
    return table


def bench_json(measured: Bench) -> dict[str, Any]:
    """The form that other programs read (DESIGN, section 7)."""
    rows = [{**asdict(row), "docs_per_s": row.docs_per_s} for row in measured.rows]
    return {
        "machine": asdict(measured.machine),
        "matmul_flops": measured.matmul_flops,
        "rows": rows,
        "ratios": measured.ratios,
    }
