"""The report of `bench`: a table for each workload, and JSON values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pipeline.report.console import Grid

if TYPE_CHECKING:
    from pipeline.verbs.bench import Bench, Row


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda row: row.method,
    "s / document": lambda row: f"{row.seconds_per_document:.2f}",
    "docs / s": lambda row: f"{row.docs_per_s:.3f}",
    "tokens / s": lambda row: f"{row.tokens_per_s:,.0f}",
    "x tree": lambda row: f"{row.times_tree:.2f}",
    "peak MB": lambda row: f"{row.peak_bytes / 1e6:,.0f}",
    "share": lambda row: f"{row.matmul_share:.0%}",
}


def show_bench(bench: Bench, console: Console) -> None:
    """The machine, a table for each workload, and what the columns mean."""
    machine = bench.machine
    weights = "" if machine.quantize == "none" else f", {machine.quantize} weights"
    console.print(
        f"{machine.processor}, {machine.threads} threads, {machine.dtype}{weights} on "
        f"{machine.device}, torch {machine.torch}"
    )
    for name, rows in groupby(bench.rows, key=lambda row: row.workload):
        grid = Grid(name, tuple(_COLUMNS), [[f(row) for f in _COLUMNS.values()] for row in rows])
        console.print(grid.table())
    console.print(
        "tokens: the documents' own tokens; x tree: median ratio of paired rounds; share: the "
        "tree's FLOP in this time, as a share of the rate of plain matrix products here, "
        f"{bench.matmul_flops / 1e9:,.0f} GFLOP/s at best"
    )


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
