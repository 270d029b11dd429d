"""What a filter kept and dropped, for people and as JSON values.

Knows counts. Knows nothing of how they came about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.data.filter_counts import Parted
from pipeline.data.filtering import Filtered
from pipeline.report.printable import printable
from pipeline.report.verdict import two_columns

SHOWN_GROUPS = 20
MEASURES = ("documents", "text_bytes", "tokens")


def show_filtered(filtered: Filtered, console: Console) -> None:
    """A table of what was kept and dropped, in all and by group, and where it is."""
    table = Table(box=None, pad_edge=False)
    for name in ("", *MEASURES):
        table.add_column(name.replace("_", " "), justify="right" if name else "left", no_wrap=True)
    for row in _rows("all", filtered.counts.all):
        table.add_row(*row)
    for column, values in filtered.counts.groups.items():
        for value, parted in _largest(values):
            for row in _rows(printable(f"{column} = {value}"), parted):
                table.add_row(*row)
        if len(values) > SHOWN_GROUPS:
            table.add_row(f"{column}: {len(values) - SHOWN_GROUPS:,} more; --json has them all")
    console.print(table, markup=False)
    console.print(two_columns(_facts(filtered)), markup=False)


def filtered_json(filtered: Filtered) -> dict[str, Any]:
    """The same for other programs."""
    return {**asdict(filtered), "complete": filtered.complete}


def _rows(name: str, parted: Parted) -> Iterator[tuple[str, ...]]:
    whole = parted.kept + parted.dropped
    for which, amount in (("kept", parted.kept), ("dropped", parted.dropped)):
        numbers = ((getattr(amount, m), getattr(whole, m)) for m in MEASURES)
        yield f"{name}, {which}", *(f"{n:,} ({_share(n, of)})" for n, of in numbers)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _largest(values: Mapping[str, Parted]) -> list[tuple[str, Parted]]:
    def documents(each: tuple[str, Parted]) -> int:
        return each[1].kept.documents + each[1].dropped.documents

    return sorted(values.items(), key=documents, reverse=True)[:SHOWN_GROUPS]


def _facts(filtered: Filtered) -> dict[str, str]:
    rows = {
        f"  {printable(reason)}": f"{count:,}"
        for reason, count in sorted(filtered.counts.reasons.items())
    }
    rows["kept at"] = filtered.kept_at
    rows["dropped at"] = filtered.dropped_at
    rows["snapshot"] = f"{filtered.snapshot:08d}, {filtered.shards:,} shards"
    rows["created now"] = f"{filtered.created:,} objects" if filtered.created else "nothing"
    if not filtered.complete:
        rows["incomplete"] = (
            f"the snapshot leaves out {filtered.missing_rows:,} documents and "
            f"{filtered.missing_files:,} files; run again, then filter again"
        )
    if filtered.new_files:
        rows["not labelled yet"] = f"{filtered.new_files:,} files of the input are not in it"
    return rows
