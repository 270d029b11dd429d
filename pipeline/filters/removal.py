"""What a rule keeps and removes: in words, and as SQL for other programs.

Entry points: `filter_report`, `removed_sql` and `stop_words`. The dry run, the filter, the audit
and the report use these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.filters.decisions import Decisions
from pipeline.filters.expressions import NO_GROUP
from pipeline.filters.policy import Clause, Judge, Policy
from pipeline.sources.documents import OK, TRUNCATED
from pipeline.sources.rule import one_line

# Digits that a decimal literal of DuckDB has, so that its value as a DOUBLE is the nearest one.
_DECIMAL_DIGITS = 15


@dataclass(frozen=True, slots=True)
class FilterReport:
    """What a filter does to a corpus."""

    rule: str  # what is true for the documents that it keeps, in words
    on_error: str
    reasons: Mapping[str, int]  # dropped documents by cause; with two causes, a document is in both
    several: int  # documents with more than one cause
    removes: str  # SQL that is true for exactly the removed documents
    failed: Mapping[str, int]  # documents without an answer, by status
    stops: bool  # the filter fails because of them, and removes nothing


def filter_report(judge: Judge, on_error: str, table: Decisions) -> FilterReport:
    """The rule in words and in SQL, with the counts of all documents."""
    failed = table.counts("nullif(failed, '')")
    return FilterReport(
        rule=kept_words(judge.policy),
        on_error=on_error,
        reasons=table.counts("unnest(causes)"),
        several=table.several,
        removes=removed_sql(judge, on_error),
        failed=failed,
        stops=on_error == "fail" and bool(failed),
    )


def kept_words(policy: Policy) -> str:
    """What is true for the documents that the policy keeps, without the thresholds of groups."""
    parts = [one_line(policy.keep, place="filter.keep")] if policy.keep else []
    for clause in policy.clauses:
        of, by = _lines(clause)
        group = f" of its group by {by}" if by else ""
        limit = f"the threshold of the highest {clause.share * 100:g} %{group}"
        parts.append(f"{of} is at most {limit}")
    return " and ".join(f"({part})" if len(parts) > 1 else part for part in parts)


def removed_sql(judge: Judge, on_error: str) -> str:
    """A SQL condition that is true for exactly the documents that the filter removes.

    It is DuckDB's SQL over the columns of `open_labels`, and over the input's columns as fields of
    a struct `doc`. With `on_error: fail` the filter removes nothing if a document has no answer, so
    the condition does not mention these documents.

    Args:
        judge: Of a policy with thresholds.
        on_error: What the filter does with documents without an answer.
    """
    policy = judge.policy
    broken = []
    if policy.keep:
        broken.append(f"({one_line(policy.keep, place='filter.keep')}) IS NOT TRUE")
    broken += [_above(clause) for clause in policy.clauses]
    condition = " OR ".join(broken) or "false"
    statuses = ["status", *(f'"{task}".status' for task in judge.tasks)]
    answers = f"IN ('{OK}', '{TRUNCATED}')"
    if on_error == "drop":
        return " OR ".join([*(f"{status} NOT {answers}" for status in statuses), condition])
    if on_error == "keep":
        return f"{' AND '.join(f'{status} {answers}' for status in statuses)} AND ({condition})"
    return condition


def _above(clause: Clause) -> str:
    """Whether the score is above the threshold of the group; a NaN is not, as a null is not."""
    of, by = _lines(clause)
    limit = _number(clause.otherwise)
    if by and clause.at:
        cases = (f"WHEN {_text(group)} THEN {_number(at)}" for group, at in clause.at.items())
        group = f"coalesce(({by})::VARCHAR, {_text(NO_GROUP)})"
        limit = f"CASE {group} {' '.join(cases)} ELSE {limit} END"
    return f"nullif(({of})::DOUBLE, 'NaN') > {limit}"


def _lines(clause: Clause) -> tuple[str, str | None]:
    """The score and the groups, each on one line."""
    of, by = clause.places
    return (
        one_line(clause.of, place=of),
        one_line(clause.by, place=by) if clause.by else None,
    )


def _text(value: str) -> str:
    quoted = value.replace("'", "''")
    return f"'{quoted}'"


def _number(value: float) -> str:
    """The number as a literal of DuckDB, which reads long ones without an exponent as decimals."""
    if not math.isfinite(value):
        return f"'{value}'::DOUBLE"
    text = repr(value)
    is_exact = "e" in text or sum(char.isdigit() for char in text) <= _DECIMAL_DIGITS
    return text if is_exact else f"{text}e0"


def unanswered_words(failed: Mapping[str, int], documents: int) -> str:
    """How many of the documents have no answer, by status."""
    statuses = ", ".join(f"{status} {count:,}" for status, count in failed.items())
    return f"{sum(failed.values()):,} of {documents:,} documents have no answer ({statuses})"


def stop_words(failed: Mapping[str, int], documents: int) -> str:
    """Why a filter stops at documents without an answer, and what to write."""
    fix = "keep or drop them: --on-error keep or drop, or filter.on_error in the spec"
    return f"{unanswered_words(failed, documents)}; {fix}"
