"""The report of `assay filter` and of its dry run, for people."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import astuple

from pipeline.filters.decisions import MOST_GROUPS
from pipeline.filters.result import FilterResult, Sizes, Written, stop_words
from pipeline.filters.rule import ALL
from pipeline.report.console import Grid, Part, printed, truncate

SHOWN_GROUPS = 20
SHOWN_THRESHOLDS = 24
SQL_CHARS = 1_000  # --json has the whole condition
_THRESHOLD = re.compile(r" WHEN '(?:[^']|'')*' THEN \S+")  # of a group
_NAMES = ("documents", "characters", "tokens")


@printed
def show_filter(result: FilterResult) -> Iterator[Part]:
    """What is kept and dropped, by group and by reason."""
    rows = [*_pair(ALL, result.sizes)]
    largest = sorted(
        (group for group in result.groups if group.group), key=lambda group: -group.documents
    )
    for group in largest[:SHOWN_GROUPS]:
        rows += _pair(", ".join(group.group.values()), group.sizes)
    if len(largest) > SHOWN_GROUPS:
        rows.append((f"more groups; --json has the {MOST_GROUPS} largest",))
    yield Grid("", ("", *_NAMES), rows)
    facts = {f"  {reason}": f"{count:,}" for reason, count in sorted(result.reasons.items())}
    facts["removes documents where"] = truncate(_shortened(result.removes), SQL_CHARS)
    facts["snapshot"] = f"{result.snapshot:08d}"
    if not result.complete:
        limited = "" if result.limit is None else f" ({result.limit})"
        facts["incomplete"] = (
            f"the snapshot{limited} leaves out {result.missing_rows:,} documents and "
            f"{result.missing_files:,} files; run again, then filter again"
        )
    if result.stops:
        facts["the filter stops"] = stop_words(result.failed, result.documents)
    yield facts
    if result.written is None:
        yield "nothing was written"
    else:
        yield from _written(result.written)


def _shortened(condition: str) -> str:
    """The condition with the thresholds of a few groups, and the number of the others."""
    others = [*_THRESHOLD.finditer(condition)][SHOWN_THRESHOLDS:]
    if not others:
        return condition
    start, end = others[0].start(), others[-1].end()
    return f"{condition[:start]} … {len(others):,} more groups; --json has them …{condition[end:]}"


def _written(written: Written) -> Iterator[Part]:
    facts = {
        "created now": f"{written.created:,} objects" if written.created else "nothing",
        "shards": f"{written.shards:,}",
    }
    if written.new_files:
        facts["not labelled yet"] = f"{written.new_files:,} files of the input are not filtered"
    yield facts
    # — not in a table, which breaks a path where the terminal ends
    yield from (f"kept: {kept}" for kept in written.kept.globs)
    yield from (f"dropped: {dropped}" for dropped in written.dropped.globs)
    yield f"paths of the last filter: {written.current}"


def _pair(name: str, sizes: Sizes) -> Iterator[tuple[str, ...]]:
    whole = astuple(sizes.kept + sizes.dropped)
    for which, size in (("kept", sizes.kept), ("dropped", sizes.dropped)):
        numbers = zip(astuple(size), whole, strict=True)
        cells = (f"{n:,} ({n / of_all:.1%})" if of_all else f"{n:,}" for n, of_all in numbers)
        yield f"{name}, {which}", *cells
