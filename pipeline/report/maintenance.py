"""The reports of `verify`, `gc` and `filter`, for people and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pipeline.report.console import Grid, escape_controls, two_columns
from pipeline.report.filters import causes_facts

if TYPE_CHECKING:
    from pipeline.filters.run import FilterResult
    from pipeline.filters.shard import SplitAmounts
    from pipeline.integrity.gc import GcResult
    from pipeline.integrity.verify import VerifyResult

SHOWN_DAMAGES = 50
SHOWN_GROUPS = 20
MEASURES = ("documents", "text_bytes", "tokens")


def show_verified(verified: VerifyResult, console: Console) -> None:
    """A table of what was read again, then a line for each thing that is wrong."""
    changed = f", {verified.inputs_changed:,} objects changed or gone since"
    facts = {
        "output": f"{verified.output}, snapshot {verified.snapshot:08d} of {verified.spec}",
        "read again": f"{verified.files:,} files of {verified.shards:,} shards",
        "rows": f"{verified.rows:,}, {verified.cells:,} answers",
        "input": f"{verified.documents_read_again:,} documents read again"
        + (changed if verified.inputs_changed else ""),
        "verdict": "intact" if verified.intact else _problems(len(verified.damages)),
    }
    console.print(two_columns(facts))
    for damage in verified.damages[:SHOWN_DAMAGES]:
        console.print(escape_controls(str(damage)))
    if len(verified.damages) > SHOWN_DAMAGES:
        console.print(f"and {len(verified.damages) - SHOWN_DAMAGES:,} more; --json has them all")


def _problems(count: int) -> str:
    return "1 problem" if count == 1 else f"{count:,} problems"


def verified_json(verified: VerifyResult) -> dict[str, Any]:
    """The same for other programs."""
    return {**asdict(verified), "intact": verified.intact}


def show_gc(result: GcResult, console: Console) -> None:
    """A table of what is, or would be, removed below each prefix."""
    kept = ", ".join(f"{number:08d}" for number in result.snapshots) or "none"
    rows = {"output": result.output, "kept snapshots": kept}
    for prefix, (count, size_bytes) in result.per_prefix.items():
        rows[prefix] = f"{count:,} objects, {size_bytes / 1e6:,.1f} MB"
    if result.young:
        rows["younger"] = f"{result.young:,} objects that nothing else needs; see --older-than"
    if result.unknown:
        rows["not touched"] = f"{result.unknown:,} unknown files, left alone"
    rows["verdict"] = "nothing was deleted; add --delete to delete these objects"
    if result.deleted:
        rows["verdict"] = "deleted"
    if not result.objects:
        rows["verdict"] = "there is nothing to delete"
    console.print(two_columns(rows))


def gc_json(result: GcResult) -> dict[str, Any]:
    """The same for other programs, with every key."""
    return {
        "output": result.output,
        "kept_snapshots": list(result.snapshots),
        "deleted": result.deleted,
        "young": result.young,
        "unknown": result.unknown,
        "prefixes": {
            prefix: {"objects": count, "size_bytes": size_bytes}
            for prefix, (count, size_bytes) in result.per_prefix.items()
        },
        "keys": list(result.keys),
    }


def show_filtered(filtered: FilterResult, console: Console) -> None:
    """A table of what was kept and dropped, in all and by group, and where it is."""
    rows = [*_rows("all", filtered.counts.all)]
    for column, values in filtered.counts.groups.items():
        largest = sorted(values, key=lambda v: -values[v].documents)
        for value in largest[:SHOWN_GROUPS]:
            rows += _rows(f"{column} = {value}", values[value])
        if len(values) > SHOWN_GROUPS:
            rows.append((f"{column}: {len(values) - SHOWN_GROUPS:,} more; --json has them all",))
    names = ("", *(name.replace("_", " ") for name in MEASURES))
    console.print(Grid("", names, rows).table(box=None, pad_edge=False))
    console.print(two_columns(_facts(filtered)))
    # — not in a table, which breaks a path where the terminal ends
    for kept in filtered.kept_globs:
        console.print(f"kept: {escape_controls(kept)}")
    console.print(f"dropped: {escape_controls(filtered.dropped_glob)}")
    console.print(f"paths of the last filter: {escape_controls(filtered.current)}")


def filtered_json(filtered: FilterResult) -> dict[str, Any]:
    """The same for other programs."""
    return {**asdict(filtered), "complete": filtered.complete}


def _rows(name: str, amounts: SplitAmounts) -> Iterator[tuple[str, ...]]:
    whole = amounts.kept + amounts.dropped
    for which, amount in (("kept", amounts.kept), ("dropped", amounts.dropped)):
        numbers = ((getattr(amount, m), getattr(whole, m)) for m in MEASURES)
        cells = (f"{n:,} ({f'{n / of:.1%}' if of else '-'})" for n, of in numbers)
        yield f"{name}, {which}", *cells


def _facts(filtered: FilterResult) -> dict[str, str]:
    rows = causes_facts(filtered.counts.reasons, filtered.counts.several, filtered.removes)
    rows["snapshot"] = f"{filtered.snapshot:08d}, {filtered.shards:,} shards"
    rows["created now"] = f"{filtered.created:,} objects" if filtered.created else "nothing"
    if not filtered.complete:
        limited = "" if filtered.slice is None else f" ({filtered.slice})"
        rows["incomplete"] = (
            f"the snapshot{limited} leaves out {filtered.missing_rows:,} documents and "
            f"{filtered.missing_files:,} files; run again, then filter again"
        )
    if filtered.new_files:
        rows["not labelled yet"] = f"{filtered.new_files:,} files of the input are not filtered"
    return rows
