"""The reports of `assay filter` and of its dry run, for people and as JSON values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.filters.decisions import Size
from pipeline.filters.dry_run import ClausePreview, FilterPreview
from pipeline.filters.removal import FilterReport, stop_words
from pipeline.filters.snapshot_rule import ALL
from pipeline.report.console import Grid, Part, printed, truncate

if TYPE_CHECKING:
    from pipeline.filters.run import FilterResult
    from pipeline.filters.shard import Amount

SHOWN_GROUPS = 20
SQL_CHARS = 1_000  # --json has the whole condition
_NAMES = ("", "documents", "characters", "tokens")
_WRITTEN = ("", "documents", "text bytes", "tokens")


@printed
def show_filter_preview(preview: FilterPreview) -> Iterator[Part]:
    """What is kept and dropped, by group, and what other shares would drop."""
    rows = [*_pair("all", preview.kept, preview.dropped)]
    largest = sorted(preview.groups.items(), key=lambda group: -sum(s.documents for s in group[1]))
    for name, (kept, dropped) in largest[:SHOWN_GROUPS]:
        rows += _pair(name, kept, dropped)
    if len(largest) > SHOWN_GROUPS:
        rows.append((f"{len(largest) - SHOWN_GROUPS:,} more groups; --json has them all",))
    yield Grid("", _NAMES, rows)
    shown = {ALL, *(name for name, _ in largest[:SHOWN_GROUPS])}
    for clause in preview.clauses:
        yield _other_shares(clause, shown)
    done = preview.filter
    facts = _causes(done.reasons, done.several, done.removes)
    facts["snapshot"] = f"{preview.snapshot:08d}; nothing was written"
    if not preview.complete:
        facts["incomplete"] = "the snapshot leaves out documents of the input; run again"
    if done.stops:
        documents = (preview.kept + preview.dropped).documents
        facts["the filter stops"] = stop_words(done.failed, documents)
    yield facts


def _causes(reasons: Mapping[str, int], several: int, removes: str) -> dict[str, str]:
    """Why documents are dropped, by cause, and the condition in SQL."""
    facts = {f"  {reason}": f"{count:,}" for reason, count in sorted(reasons.items())}
    if several:
        facts["  more than one of these"] = f"{several:,}"
    facts["removes documents where"] = truncate(removes, SQL_CHARS)
    return facts


Sizes = Mapping[Literal["kept", "dropped"], Size]


@dataclass(frozen=True, slots=True)
class GroupJson:
    """What a filter would do to one group of documents."""

    group: Mapping[str, str]  # empty: all documents
    documents: int
    dropped: int
    threshold: float | None
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class FilterPreviewJson(FilterReport):
    """What a filter would do, for other programs."""

    snapshot: int
    keep: str | None
    documents: int
    kept: int
    dropped: int
    complete: bool
    sizes: Sizes
    groups: list[GroupJson]
    clauses: tuple[ClausePreview, ...]


def filter_preview_json(preview: FilterPreview) -> FilterPreviewJson:
    """The same for other programs: numbers of documents in all and by group, and every size.

    The groups are those of the first clause with groups; without one, all documents are one group.
    """
    whole = {"": (preview.kept, preview.dropped)}
    clauses = [part.clause for part in preview.clauses]
    clause = next((named for named in clauses if named.by), clauses[0] if clauses else None)
    by = clause.by if clause else None
    groups = [
        GroupJson(
            group={by.removesuffix(".label"): name} if by else {},
            documents=(kept + dropped).documents,
            dropped=dropped.documents,
            threshold=clause.at.get(name, clause.otherwise) if clause else None,
            sizes={"kept": kept, "dropped": dropped},
        )
        for name, (kept, dropped) in (preview.groups or whole).items()
    ]
    return FilterPreviewJson(
        **asdict(preview.filter),
        snapshot=preview.snapshot,
        keep=preview.keep,
        documents=(preview.kept + preview.dropped).documents,
        kept=preview.kept.documents,
        dropped=preview.dropped.documents,
        complete=preview.complete,
        sizes={"kept": preview.kept, "dropped": preview.dropped},
        groups=groups,
        clauses=preview.clauses,
    )


@printed
def show_filtered(filtered: FilterResult) -> Iterator[Part]:
    """A table of what was kept and dropped, and where it is."""
    amounts, counts = filtered.counts.all, filtered.counts
    yield Grid("", _WRITTEN, [*_pair("all", amounts.kept, amounts.dropped)])
    facts = _causes(counts.reasons, counts.several, filtered.removes)
    facts["snapshot"] = f"{filtered.snapshot:08d}, {filtered.shards:,} shards"
    facts["created now"] = f"{filtered.created:,} objects" if filtered.created else "nothing"
    if not filtered.complete:
        limited = "" if filtered.limit is None else f" ({filtered.limit})"
        facts["incomplete"] = (
            f"the snapshot{limited} leaves out {filtered.missing_rows:,} documents and "
            f"{filtered.missing_files:,} files; run again, then filter again"
        )
    if filtered.new_files:
        facts["not labelled yet"] = f"{filtered.new_files:,} files of the input are not filtered"
    yield facts
    # — not in a table, which breaks a path where the terminal ends
    yield from (f"kept: {kept}" for kept in filtered.kept_globs)
    yield f"dropped: {filtered.dropped_glob}"
    yield f"paths of the last filter: {filtered.current}"


def _pair(name: str, kept: Size | Amount, dropped: Size | Amount) -> Iterator[tuple[str, ...]]:
    for which, size in (("kept", kept), ("dropped", dropped)):
        numbers = zip(astuple(size), astuple(kept), astuple(dropped), strict=True)
        cells = (f"{n:,} ({n / (a + b):.1%})" if a + b else f"{n:,}" for n, a, b in numbers)
        yield f"{name}, {which}", *cells


def _other_shares(preview: ClausePreview, shown: Collection[str]) -> Grid:
    rows = [
        (
            row.group,
            f"{row.share:.1%}",
            f"{row.threshold:.4g}",
            *(f"{number:,}" for number in astuple(row.dropped)),
        )
        for row in preview.grid
        if row.group in shown
    ]
    names = ("group", "share", "threshold", *_NAMES[1:])
    return Grid(f"dropped at other shares, by {preview.clause.of}", names, rows)
