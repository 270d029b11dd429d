"""What a filter does: counts, words, and SQL for other programs.

Entry points: `result_of`, and `stop_words` for a filter that stops. The dry run, the filter and the
report show the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import computed_field

from pipeline.filters.decisions import MOST_GROUPS, OTHERS, Decisions, Size, Thresholds, number
from pipeline.filters.rule import FilterRule, SnapshotRule
from pipeline.options import OnError
from pipeline.sources.documents import OK, SKIPPED, TRUNCATED
from pipeline.sources.rule import named, quoted


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is kept and what is dropped."""

    kept: Size
    dropped: Size


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What a filter does to one group of documents."""

    group: Mapping[str, str]  # what the groups are, and the name of this one; empty: all documents
    documents: int
    dropped: int
    threshold: float | None  # of `drop_top`; None of `OTHERS`
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Files:
    """A folder, and a pattern for each format of its files; a file is in one of them."""

    folder: str
    globs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """Where a filter wrote the documents."""

    kept: Files
    dropped: Files
    current: str  # the file that always names the last filter of this folder
    manifest: str
    shards: int
    created: int  # objects; 0 if everything existed
    new_files: int  # files of the input that are not in the snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterResult:
    """What a filter does to the documents of a snapshot."""

    snapshot: int
    rule: str  # what is true for the documents that it keeps, in words
    on_error: OnError
    removes: str  # SQL that is true for exactly the dropped documents
    documents: int
    dropped: int
    sizes: Sizes
    groups: tuple[GroupResult, ...]  # of `drop_top`; without groups, all documents
    reasons: Mapping[str, int]  # dropped documents by reason; a document may have several
    failed: Mapping[str, int]  # documents without an answer, by status
    missing_rows: int  # rows of the input that the snapshot does not have
    missing_files: int
    limit: str | None  # the condition of the run that made the snapshot
    written: Written | None = None  # None of a dry run

    @computed_field
    @property
    def complete(self) -> bool:
        """Whether the snapshot leaves out no document of the input."""
        return not self.missing_rows and not self.missing_files

    @computed_field
    @property
    def stops(self) -> bool:
        """Whether the filter stops at documents without an answer, and removes nothing."""
        return self.on_error == "fail" and bool(self.failed)


def result_of(rule: SnapshotRule, on_error: OnError, table: Decisions) -> FilterResult:
    """What the filter does, by the decisions about all documents."""
    kept, dropped = table.whole
    contents = rule.labelled.contents
    return FilterResult(
        snapshot=contents.number,
        rule=kept_words(rule.rule),
        on_error=on_error,
        removes=removed_sql(rule.rule, table.thresholds, on_error),
        documents=(kept + dropped).documents,
        dropped=dropped.documents,
        sizes=Sizes(kept, dropped),
        groups=_groups(rule, table),
        reasons=table.counts("unnest(_reasons)"),
        failed=table.counts("_failed"),
        missing_rows=contents.missing_rows,
        missing_files=contents.missing_files,
        limit=contents.limit,
    )


def _groups(rule: SnapshotRule, table: Decisions) -> tuple[GroupResult, ...]:
    """The largest groups of `drop_top` by name, and `OTHERS`; without groups, all documents."""
    written = rule.labelled.spec.filter
    assert written is not None
    top, thresholds = written.drop_top, table.thresholds
    by = top.by if top else None  # — as it is written in the spec
    sizes = {"": table.whole} if by is None else table.sizes("_part", MOST_GROUPS)
    return tuple(
        GroupResult(
            group={} if by is None else {by: name},
            documents=(kept + dropped).documents,
            dropped=dropped.documents,
            threshold=(
                thresholds.at.get(name, thresholds.otherwise)
                if thresholds and name != OTHERS
                else None
            ),
            sizes=Sizes(kept, dropped),
        )
        for name, (kept, dropped) in sorted(sizes.items())
    )


def kept_words(rule: FilterRule) -> str:
    """What is true for the documents that the rule keeps, without the thresholds of groups."""
    keep, top = rule.filter.keep, rule.filter.drop_top
    parts = [keep] if keep else []
    if top is not None:
        group = f" of its group by {top.by}" if top.by else ""
        share = f"the highest {top.share * 100:g} %"
        parts.append(f"{top.of} is at most the threshold of {share}{group}")
    return " and ".join(f"({part})" if len(parts) > 1 else part for part in parts)


def removed_sql(rule: FilterRule, thresholds: Thresholds | None, on_error: OnError) -> str:
    """A SQL condition that is true for exactly the documents that the filter removes.

    It is DuckDB's SQL over the columns of `open_labels`, and over the input's columns as fields of
    a struct `doc`. Its negation as `keep` keeps the same documents. With `on_error: fail` the
    filter removes nothing if a document has no answer, so the condition does not mention these.
    """
    # — a row on which an expression fails has null, as in the filter
    broken = [f"TRY({rule.filter.keep}) IS NOT TRUE"] if rule.filter.keep else []
    if rule.score is not None and thresholds is not None:
        limit = number(thresholds.otherwise)
        if rule.group is not None and thresholds.at:
            cases = (f"WHEN {quoted(g)} THEN {number(at)}" for g, at in thresholds.at.items())
            limit = f"CASE {rule.group.group} {' '.join(cases)} ELSE {limit} END"
        broken.append(f"{rule.score.number} > {limit}")
    condition = " OR ".join(broken)
    statuses = ["status", *(named(task, "status") for task in rule.tasks)]
    answered = f"IN ('{OK}', '{TRUNCATED}', '{SKIPPED}')"
    if on_error == "drop":
        return " OR ".join([*(f"{status} NOT {answered}" for status in statuses), condition])
    if on_error == "keep":
        return f"{' AND '.join(f'{status} {answered}' for status in statuses)} AND ({condition})"
    return condition


def unanswered_words(failed: Mapping[str, int], documents: int) -> str:
    """How many of the documents have no answer, by status."""
    statuses = ", ".join(f"{status} {count:,}" for status, count in failed.items())
    return f"{sum(failed.values()):,} of {documents:,} documents have no answer ({statuses})"


def stop_words(failed: Mapping[str, int], documents: int) -> str:
    """Why a filter stops at documents without an answer, and what to write."""
    fix = "keep or drop them: --on-error keep or drop, or filter.on_error in the spec"
    return f"{unanswered_words(failed, documents)}; {fix}"
