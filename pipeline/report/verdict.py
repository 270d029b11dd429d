"""What a verification or a tidying-up found, for people and as JSON values.

Knows findings. Knows nothing of how they came about.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.data.verification import Verified

SHOWN_DAMAGES = 50


def show_verified(verified: Verified, console: Console) -> None:
    """A table of what was read again, then a line for each thing that is wrong."""
    console.print(
        two_columns(
            {
                "output": f"{verified.output}, snapshot {verified.snapshot:08d} of {verified.spec}",
                "read again": f"{verified.files:,} files of {verified.shards:,} shards",
                "rows": f"{verified.rows:,}, {verified.cells:,} answers",
                "input": _input(verified),
                "verdict": "intact" if verified.intact else f"{len(verified.damages):,} DAMAGES",
            }
        ),
        markup=False,
    )
    for damage in verified.damages[:SHOWN_DAMAGES]:
        console.print(str(damage), markup=False)
    if len(verified.damages) > SHOWN_DAMAGES:
        console.print(f"and {len(verified.damages) - SHOWN_DAMAGES:,} more; --json has them all")


def verified_json(verified: Verified) -> dict[str, Any]:
    """The same for other programs."""
    return {**asdict(verified), "intact": verified.intact}


def two_columns(rows: dict[str, str]) -> Table:
    """Names and values."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _input(verified: Verified) -> str:
    compared = f"{verified.documents_read_again:,} documents read again"
    changed = verified.inputs_changed
    return f"{compared}, {changed:,} objects changed or gone since" if changed else compared
