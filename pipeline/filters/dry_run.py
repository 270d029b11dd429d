"""What a filter would drop, and what other shares would; nothing is written. Entry: `preview`.

The labels are read twice: once for the thresholds of `drop_top`, once for what they drop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.filters.decisions import (
    Decisions,
    Pairs,
    Size,
    decisions,
    limits,
    sizes_where,
    with_thresholds,
)
from pipeline.filters.policy import Clause
from pipeline.filters.removal import FilterReport, filter_report
from pipeline.filters.snapshot_rule import ALL, SnapshotRule
from pipeline.options import FilterOptions
from pipeline.spec.schema import JobSpec

# The shares of the documents that a grid is computed for.
GRID = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)


@dataclass(frozen=True, slots=True)
class GridRow:
    """What a share of the highest scores holds, in one group."""

    share: float
    group: str
    threshold: float
    dropped: Size


@dataclass(frozen=True, slots=True)
class ClausePreview:
    """One clause of the policy, and a grid of other shares for its score and groups."""

    clause: Clause
    grid: tuple[GridRow, ...]


@dataclass(frozen=True, slots=True)
class FilterPreview:
    """What a filter would do."""

    snapshot: int
    keep: str | None
    filter: FilterReport
    kept: Size  # also the documents at which the filter stops
    dropped: Size
    complete: bool  # the snapshot leaves out no document of the input
    clauses: tuple[ClausePreview, ...]
    groups: Pairs  # of the first clause with groups


def preview(spec: JobSpec, options: FilterOptions, *, cache_dir: Path) -> FilterPreview:
    """What the spec's filter would drop; SpecError as the filter itself raises it."""
    rule = SnapshotRule.of(spec).grouped()
    rule.warn_of_older_answers(cache_dir)
    contents = rule.contents
    shards = rule.input_shards(cache_dir)
    policy = with_thresholds(rule, shards)
    judge, on_error = rule.judge(policy), options.on_error or rule.filter.on_error
    with decisions(rule, policy, shards, on_error, read=[rule.counted_task(judge)]) as table:
        kept, dropped = table.whole
        return FilterPreview(
            snapshot=contents.number,
            keep=policy.keep,
            filter=filter_report(judge, on_error, table),
            kept=kept,
            dropped=dropped,
            complete=not contents.missing_rows and not contents.missing_files,
            clauses=tuple(
                ClausePreview(clause, tuple(_grid(table, clause, number)))
                for number, clause in enumerate(policy.clauses)
            ),
            groups=dict(sorted(table.sizes("grp").items())) if rule.by else {},
        )


def _grid(table: Decisions, clause: Clause, number: int) -> Iterator[GridRow]:
    """What each share of `GRID` drops by this clause, of all documents and of each group."""
    groups = "union all from scored" if clause.by else ""
    rows = table.rows(
        f"""
        with scored as (
            select group_{number} as part, score_{number} as score, n_chars, tokens
            from documents where failed = '' and isfinite(score_{number})
        ),
        parts as (select * replace ('{ALL}' as part) from scored {groups}),
        limits as ({limits("parts", GRID)})
        select share::DOUBLE, part, threshold, {sizes_where("score > threshold")}
        from limits join parts using (part)
        group by share, part, threshold order by part <> '{ALL}', part, share
        """
    )
    for share, part, threshold, *size in rows:
        yield GridRow(share, part, threshold, Size(*size))
