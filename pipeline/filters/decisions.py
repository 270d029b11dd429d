"""What a filter decides about each document of a snapshot: a table of DuckDB, and counts of it.

Entry points: `decisions` for the table, `with_thresholds` for a policy with all of its numbers. A
table is in a temporary file, so it may be larger than the memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import Problem, SpecError, StorageError
from pipeline.filters.policy import Judge, Policy
from pipeline.filters.snapshot_rule import ALL, SnapshotRule
from pipeline.ledger.rows import DOCUMENT_SCHEMA
from pipeline.sources.documents import SKIPPED
from pipeline.sources.shards import Shard

OTHERS = "others"
MOST_GROUPS = 200  # the largest; the others are counted together
# What does not fit is written to a temporary folder. Each thread needs some of the memory.
_BOUNDS: dict[str, str | int | float | list[str]] = {"memory_limit": "512MB", "threads": 4}


@dataclass(frozen=True, slots=True)
class Size:
    """A number of documents, with what they hold."""

    documents: int = 0
    chars: int = 0
    tokens: int = 0  # that the model reads of them

    def __add__(self, other: Size) -> Size:
        return Size(
            self.documents + other.documents, self.chars + other.chars, self.tokens + other.tokens
        )


Pairs = Mapping[str, tuple[Size, Size]]  # by group: kept, dropped


class Decisions:
    """The table `documents`: a row for each document, with the decision about it.

    Its columns are those of every document, and `tokens`, `failed`, `dropped`, `causes`, `reason`,
    `grp`, `score_N` and `group_N` of clause number N, and those that were asked for.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def rows(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        return self._connection.execute(query, list(values)).fetchall()

    def table(self, query: str, values: Sequence[object] = ()) -> pa.Table:
        """The same as an Arrow table."""
        with self._connection.cursor() as cursor:
            return cursor.sql(query, params=list(values)).to_arrow_table()

    def add(self, name: str, rows: pa.Table) -> None:
        """Adds rows to the table of this name."""
        self._connection.register("added", rows)
        self._connection.execute(f"create table if not exists {name} as from added with no data")
        self._connection.execute(f"insert into {name} from added")

    def counts(self, value: str) -> dict[str, int]:
        """The documents by a value, the most frequent first. Null is left out."""
        return dict(
            self.rows(
                f"select v, count(*) from (select {value} as v from documents) "
                "where v is not null group by v order by 2 desc, 1"
            )
        )

    def sizes(self, group: str, most: int | None = None) -> dict[str, tuple[Size, Size]]:
        """Kept and dropped documents by group, the largest first; all but `most` are `OTHERS`.

        A group of that name is counted with them.
        """
        rows = self.rows(
            f"with places as ({places(group, most)}) select shown, {sizes_where('not dropped')}, "
            f"{sizes_where('dropped')} from documents join places on {group} = name "
            "group by shown order by max(place)"
        )
        return {name: (Size(*row[:3]), Size(*row[3:])) for name, *row in rows}

    @property
    def whole(self) -> tuple[Size, Size]:
        """All documents: kept and dropped."""
        return self.sizes(f"'{ALL}'").get(ALL, (Size(), Size()))

    @property
    def several(self) -> int:
        """The documents that more than one cause drops: they are in the counts of each."""
        [(count,)] = self.rows("select count(*) from documents where len(causes) > 1")
        return int(count)


def places(group: str, most: int | None = None) -> str:
    """A query: each group, its place by size, and the name under which it is shown."""
    place = "row_number() over (order by count(*) desc, name)"
    shown = f"if(place <= {most}, name, '{OTHERS}')" if most else "name"
    return (
        f"select *, {shown} as shown from (select {group} as name, {place} as place from documents "
        "group by name)"
    )


def sizes_where(condition: str) -> str:
    """The columns of a `Size`, of the documents for which the condition is true."""
    sums = (
        f"coalesce(sum({name}) filter ({condition}), 0)::BIGINT" for name in ("n_chars", "tokens")
    )
    return ", ".join((f"count(*) filter ({condition})", *sums))


@contextmanager
def decisions(
    rule: SnapshotRule,
    policy: Policy,
    shards: Mapping[str, Shard],
    on_error: str,
    *,
    read: Collection[str],
    columns: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Decisions]:
    """The decisions about all documents; the labels are read once.

    Args:
        rule: With the groups to count.
        policy: Of the rule, with thresholds.
        shards: The snapshot's shards in the input by id.
        on_error: What the filter does with documents without an answer.
        read: The tasks of which the one that reads most of a document says its tokens.
        columns: More columns by name: the task, and the fields below it.
    """
    judge, groups = rule.judge(policy), rule.groups()
    with scratch() as table:
        for rows, failed in rule.rows(shards):
            added = _decided(judge, rows, failed, on_error)
            added["grp"] = pa.array(groups(rows), pa.string())
            tokens = (pc.struct_field(rows.column(task), "n_tokens") for task in read)
            added["tokens"] = pc.fill_null(pc.max_element_wise(*tokens), 0)
            for name, (task, *fields) in (columns or {}).items():
                added[name] = pc.struct_field(rows.column(task), fields)
            table.add("documents", pa.table(added))
        yield table


def _decided(
    judge: Judge, rows: pa.RecordBatch, failed: Sequence[str], on_error: str
) -> dict[str, Any]:
    """The columns of the documents, and what the filter does with each."""
    decision = judge.decide(rows, failed, on_error)
    columns: dict[str, Any] = {name: rows.column(name) for name in DOCUMENT_SCHEMA.names}
    columns |= {
        "failed": pa.array(failed, pa.string()),
        "dropped": decision.dropped,
        "causes": pa.array(decision.causes, pa.list_(pa.string())),
        "reason": pa.array(decision.reasons, pa.string()),
    }
    for number, (scores, groups) in enumerate(zip(decision.scores, decision.groups, strict=True)):
        columns |= {f"score_{number}": scores, f"group_{number}": pa.array(groups, pa.string())}
    return columns


@contextmanager
def scratch() -> Iterator[Decisions]:
    """Tables in a temporary file. StorageError if they cannot be written."""
    with tempfile.TemporaryDirectory(prefix="assay-filter-") as folder:
        try:
            with duckdb.connect(f"{folder}/tables.duckdb", config=_BOUNDS) as connection:
                yield Decisions(connection)
        except duckdb.Error as error:
            reason = f"cannot hold the counts: {str(error).splitlines()[0]}"
            fix = "set TMPDIR to a folder with more room"
            raise StorageError(f"{folder}: {reason}; {fix}") from error


def limits(scores: str, shares: Sequence[float]) -> str:
    """A query: the threshold of each share of the highest scores, for each part of the scores.

    It is the largest score that stays when at most this share goes: of n scores, number
    n - floor(n * share), as DuckDB's `quantile_disc(score, 1 - share)`. Decimals keep it exact.
    """
    values = ", ".join(f"({Decimal(str(share)):f})" for share in shares)
    return f"""
        select part, n, share, score as threshold from (
            select part, score, row_number() over (partition by part order by score) as place,
                count(*) over (partition by part) as n
            from {scores}
        ) join (values {values}) as shares(share) on place = n - floor(n * share)
    """


def with_thresholds(rule: SnapshotRule, shards: Mapping[str, Shard]) -> Policy:
    """The rule's policy with the thresholds of `drop_top`, exact over all rows.

    Raises:
        SpecError: A row that did not fail has no score, or no row has one.
    """
    if rule.filter.policy is not None:
        return rule.policy
    judge, top = rule.judge(rule.policy), rule.filter.drop_top
    tasks = {name: task.fp for name, task in rule.contents.tasks.items() if name in judge.columns}
    if top is None:
        return replace(rule.policy, tasks=tasks)
    [bound] = [clause for clause in judge.clauses if clause.clause.kind == "drop_top"]
    with scratch() as table:
        for rows, failed in rule.rows(shards):
            answered = np.array([not status for status in failed], np.bool_)
            scores = bound.scores(rows)
            # — a question that was not asked has no score
            asked = np.ones(len(scores), np.bool_)
            for name in tasks:
                status = pc.struct_field(rows.column(name), "status")
                asked &= pc.not_equal(status, SKIPPED).to_numpy(zero_copy_only=False)
            answered &= asked
            if (missing := np.flatnonzero(answered & ~np.isfinite(scores))).size:
                doc_id = rows.column("doc_id")[int(missing[0])].as_py()
                fix = f"is not a finite number for document {doc_id!r}, which has an answer"
                fix += "; write coalesce(..., 0)"
                raise SpecError([Problem("filter.drop_top.of", fix, top.of)])
            scored = pa.table({"score": scores, "part": pa.array(bound.groups(rows), pa.string())})
            table.add("scores", scored.filter(pa.array(answered)))
        whole = table.rows(limits("(select '' as part, score from scores)", [top.share]))
        groups = table.rows(limits("scores", [top.share]) + "order by part") if top.by else []
    if not whole:
        fix = "no document has a score, so there is no threshold; label first"
        raise SpecError([Problem("filter.drop_top.of", fix, top.of)])
    done = replace(
        bound.clause,
        otherwise=whole[0][-1],
        at={name: at for name, size, _, at in groups if size >= top.smallest},
        sizes={name: size for name, size, *_ in groups},
        small=tuple(name for name, size, *_ in groups if size < top.smallest),
    )
    clauses = tuple(done if clause is bound.clause else clause for clause in rule.policy.clauses)
    return replace(rule.policy, clauses=clauses, tasks=tasks)
