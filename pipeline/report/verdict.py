"""What a verification or a tidying-up found, for people and as JSON values.

Knows findings. Knows nothing of how they came about.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.data.housekeeping import Tidied
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


def show_tidied(tidied: Tidied, console: Console) -> None:
    """A table of what is, or would be, removed below each prefix."""
    removable = tidied.removable
    kept = ", ".join(f"{number:08d}" for number in tidied.snapshots) or "none"
    rows = {"output": tidied.output, "kept snapshots": kept}
    for prefix, (count, size_bytes) in removable.per_prefix.items():
        rows[prefix] = f"{count:,} objects, {size_bytes / 1e6:,.1f} MB"
    if removable.unknown:
        rows["left alone"] = f"{removable.unknown:,} keys that are not assay's"
    rows["verdict"] = _verdict(tidied)
    console.print(two_columns(rows), markup=False)


def tidied_json(tidied: Tidied) -> dict[str, Any]:
    """The same for other programs, with every key."""
    removable = tidied.removable
    return {
        "output": tidied.output,
        "kept_snapshots": list(tidied.snapshots),
        "deleted": tidied.deleted,
        "unknown": removable.unknown,
        "prefixes": {
            prefix: {"objects": count, "size_bytes": size_bytes}
            for prefix, (count, size_bytes) in removable.per_prefix.items()
        },
        "keys": list(removable.keys),
    }


def two_columns(rows: dict[str, str]) -> Table:
    """Names and values."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _verdict(tidied: Tidied) -> str:
    if not tidied.removable.objects:
        return "there is nothing to delete"
    return "deleted" if tidied.deleted else "nothing was deleted: --delete removes these"


def _input(verified: Verified) -> str:
    compared = f"{verified.documents_read_again:,} documents read again"
    changed = verified.inputs_changed
    return f"{compared}, {changed:,} objects changed or gone since" if changed else compared
