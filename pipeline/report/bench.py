"""The report of `bench`: a table for each workload, and JSON values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from pipeline.verbs.bench import Bench, Row


def show_bench(bench: Bench, console: Console) -> None:
    """The machine, a table for each workload, and what the columns mean."""
    machine = bench.machine
    weights = "" if machine.quantize == "none" else f", {machine.quantize} weights"
    console.print(
        f"{machine.processor}, {machine.threads} threads, {machine.dtype}{weights} on "
        f"{machine.device}, torch {machine.torch}"
    )
    for name, rows in groupby(bench.rows, key=lambda row: row.workload):
        console.print(_table(name, rows))
    console.print(
        "tokens: the documents' own tokens; x tree: median ratio of paired rounds; share: the "
        "tree's FLOP in this time, as a share of the rate of plain matrix products here, "
        f"{bench.matmul_flops / 1e9:,.0f} GFLOP/s at best"
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


def bench_json(bench: Bench) -> dict[str, Any]:
    """The form that other programs read (DESIGN, section 7)."""
    return {
        "machine": asdict(bench.machine),
        "matmul_flops": bench.matmul_flops,
        "rows": [
            {**asdict(row), "docs_per_s": row.docs_per_s, "tokens_per_s": row.tokens_per_s}
            for row in bench.rows
        ],
    }
