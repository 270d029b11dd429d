"""The report of `assay filter --dry-run`, for people and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pipeline.filters.removal import stop_words
from pipeline.report.console import Grid, truncate, two_columns

if TYPE_CHECKING:
    from pipeline.filters.dry_run import ClausePreview, FilterPreview, Size

SHOWN_GROUPS = 20
SQL_CHARS = 1_000  # --json has the whole condition
_NAMES = ("", "documents", "characters", "tokens")


def show_filter_preview(preview: FilterPreview, console: Console) -> None:
    """What is kept and dropped, by group, and what other shares would drop."""
    rows = [*_pair("all", preview.kept, preview.dropped)]
    largest = sorted(preview.groups.items(), key=lambda each: -sum(s.documents for s in each[1]))
    for name, (kept, dropped) in largest[:SHOWN_GROUPS]:
        rows += _pair(name, kept, dropped)
    if len(largest) > SHOWN_GROUPS:
        rows.append((f"{len(largest) - SHOWN_GROUPS:,} more groups; --json has them all",))
    console.print(Grid("", _NAMES, rows).table(box=None, pad_edge=False))
    for clause in preview.clauses:
        _show_grid(clause, [name for name, _ in largest[:SHOWN_GROUPS]], console)
    facts = causes_facts(preview.reasons, preview.several, preview.removes)
    facts["snapshot"] = f"{preview.snapshot:08d}; nothing was written"
    if not preview.complete:
        facts["incomplete"] = "the snapshot leaves out documents of the input; run again"
    if preview.stops:
        documents = preview.kept.documents + preview.dropped.documents
        facts["the filter stops"] = stop_words(preview.failed, documents)
    console.print(two_columns(facts))


def causes_facts(reasons: Mapping[str, int], several: int, removes: str) -> dict[str, str]:
    """Why documents are dropped, by cause, and the condition in SQL."""
    facts = {f"  {reason}": f"{count:,}" for reason, count in sorted(reasons.items())}
    if several:
        facts["  more than one of these"] = f"{several:,}"
    facts["removes documents where"] = truncate(removes, SQL_CHARS)
    return facts


def filter_preview_json(preview: FilterPreview) -> dict[str, Any]:
    """The same for other programs: numbers of documents in all and by group, and every size.

    The groups are those of the first clause with groups; without one, all documents are one group.
    """
    whole = {"": (preview.kept, preview.dropped)}
    clauses = [each.clause for each in preview.clauses]
    clause = next((each for each in clauses if each["by"]), clauses[0] if clauses else None)
    by = clause["by"] if clause else None
    groups = [
        {
            "group": {by.removesuffix(".label"): name} if by else {},
            "documents": kept.documents + dropped.documents,
            "dropped": dropped.documents,
            "threshold": clause["at"].get(name, clause["otherwise"]) if clause else None,
            "sizes": {"kept": asdict(kept), "dropped": asdict(dropped)},
        }
        for name, (kept, dropped) in (preview.groups or whole).items()
    ]
    return asdict(preview) | {
        "documents": preview.kept.documents + preview.dropped.documents,
        "kept": preview.kept.documents,
        "dropped": preview.dropped.documents,
        "sizes": {"kept": asdict(preview.kept), "dropped": asdict(preview.dropped)},
        "groups": groups,
    }


def _pair(name: str, kept: Size, dropped: Size) -> Iterator[tuple[str, ...]]:
    for which, size in (("kept", kept), ("dropped", dropped)):
        measures = (asdict(each).values() for each in (size, kept, dropped))
        numbers = zip(*measures, strict=True)
        cells = (f"{n:,} ({n / (a + b):.1%})" if a + b else f"{n:,}" for n, a, b in numbers)
        yield f"{name}, {which}", *cells


def _show_grid(preview: ClausePreview, shown: list[str], console: Console) -> None:
    rows = [
        (
            row.group,
            f"{row.share:.1%}",
            f"{row.threshold:.4g}",
            *(f"{number:,}" for number in asdict(row.dropped).values()),
        )
        for row in preview.grid
        if row.group == "all" or row.group in shown
    ]
    names = ("group", "share", "threshold", *_NAMES[1:])
    title = f"dropped at other shares, by {preview.clause['of']}"
    console.print(Grid(title, names, rows).table(box=None, pad_edge=False))
