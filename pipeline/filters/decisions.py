"""What a filter decides about each document of a snapshot: a table of DuckDB, and counts of it.

Entry point: `decided`. The labels are read once. The table is in a temporary file, so it may be
larger than the memory; it has no texts. As in `sources.rule`, its SQL has no access to files or the
network.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import chain
from typing import Any

import duckdb
import pyarrow as pa

from pipeline.errors import Problem, SpecError, StorageError
from pipeline.filters.rule import ALL, OF, FilterRule, Group
from pipeline.ledger.rows import INPUT
from pipeline.sources.documents import OK, SKIPPED, TRUNCATED
from pipeline.sources.rule import ALIAS, SEALED, named, quoted
from pipeline.spec.filters import DropTopSpec

OTHERS = "others"
MOST_GROUPS = 200  # the largest; the others are counted together
# What does not fit is written to a temporary folder. Each thread needs some of the memory.
_BOUNDS: dict[str, str | int | float | list[str]] = {"memory_limit": "512MB", "threads": 4}
_DIGITS = 6  # of a threshold in the reason of a dropped document; `Thresholds` have all of them


@dataclass(frozen=True, slots=True)
class Size:
    """A number of documents, with what they hold."""

    documents: int = 0
    chars: int = 0
    tokens: int = 0  # that the model reads of them, for the task that reads most

    def __add__(self, other: Size) -> Size:
        return Size(
            self.documents + other.documents, self.chars + other.chars, self.tokens + other.tokens
        )


Pairs = Mapping[str, tuple[Size, Size]]  # by group: kept, dropped


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The scores above which `drop_top` drops a document."""

    otherwise: float  # of the groups that are not in `at`
    at: Mapping[str, float]  # by group


@dataclass(frozen=True, slots=True)
class Decisions:
    """The table `documents`: the rows of all shards, each with the decision about it.

    Columns with an underscore are beside those of the rows: `_shard` (a number), `_tokens`,
    `_failed` (a status, or null), `_ranked` (whether it counts for thresholds), `_group`, `_keep_N`
    (whether condition N is true); with `drop_top` also `_score`, `_part` (its group) and
    `_threshold`; `_dropped`, `_reasons` (a list) and `_why` (the reasons in words, with thresholds;
    '' where it is kept).
    """

    connection: duckdb.DuckDBPyConnection
    thresholds: Thresholds | None = None  # of `drop_top`

    def rows(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query. Several threads may call it."""
        with self.connection.cursor() as cursor:
            return cursor.execute(query, list(values)).fetchall()

    def table(self, query: str, values: Sequence[object] = ()) -> pa.Table:
        """The same as an Arrow table."""
        with self.connection.cursor() as cursor:
            return cursor.sql(query, params=list(values)).to_arrow_table()

    def add(self, name: str, rows: pa.Table, columns: str = "*") -> None:
        """Adds these columns of the rows, as SQL, to the table of this name."""
        self.connection.register("added", rows)
        query = f"select {columns} from added as {ALIAS}"
        self.connection.execute(f"create table if not exists {name} as {query} with no data")
        self.connection.execute(f"insert into {name} {query}")

    def of_shard(self, number: int) -> pa.Table:  # [docs of the shard]
        """The documents of a shard, in their order."""
        return self.table("select * from documents where _shard = ? order by row", [number])

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
        counted = ("count(*)", "sum(n_chars)", "sum(_tokens)")  # — as in `Size`
        sums = (
            f"coalesce({of} filter ({which}), 0)::BIGINT"
            for which in ("not _dropped", "_dropped")
            for of in counted
        )
        place = "row_number() over (order by count(*) desc, _name)"
        shown = f"if(_place <= {most}, _name, {quoted(OTHERS)})" if most else "_name"
        rows = self.rows(
            f"""
            with sizes as (
                select {group} as _name, {place} as _place from documents group by _name
            ),
            places as (select *, {shown} as _shown from sizes)
            select _shown, {", ".join(sums)}
            from documents join places on {group} = _name group by _shown order by max(_place)
            """
        )
        return {name: (Size(*row[:3]), Size(*row[3:])) for name, *row in rows}

    @property
    def whole(self) -> tuple[Size, Size]:
        """All documents: kept and dropped."""
        return self.sizes("''").get("", (Size(), Size()))


@contextmanager
def decided(
    rule: FilterRule,
    shards: Iterable[pa.RecordBatch],  # with the rule's schema
    on_error: str,
    by: Sequence[Group] = (),
) -> Iterator[Decisions]:
    """The decisions about all documents of these shards.

    With `on_error: fail`, documents without an answer are kept. `by` are the groups; without them
    `_group` is `ALL`. SpecError if a row that did not fail has no score, or no row has one;
    StorageError if the table cannot be written.
    """
    columns = f"*, {', '.join(f'{sql} as {name}' for name, sql in _columns(rule, by).items())}"
    no_rows = pa.RecordBatch.from_pylist([], rule.schema)  # — a snapshot may have no shard
    with scratch() as table:
        for number, rows in enumerate(chain([no_rows], shards), start=-1):
            shard = pa.array([number] * rows.num_rows, pa.int32())
            numbered = pa.Table.from_batches([rows]).append_column("_shard", shard)
            if rule.side is None:
                table.add("answers", numbered, columns)
            else:
                table.add("labelled", numbered)
        if rule.side is not None:
            query = rule.side.join(table.connection, "labelled", columns)
            table.connection.execute(f"create table answers as {query}; drop table labelled")
        top = rule.filter.drop_top
        thresholds = None if top is None else _thresholds(table, top)
        table.rows(_decisions_view(rule, on_error, thresholds))
        yield replace(table, thresholds=thresholds)


@contextmanager
def scratch() -> Iterator[Decisions]:
    """Tables in a temporary file. StorageError if they cannot be written."""
    with tempfile.TemporaryDirectory(prefix="assay-filter-") as folder:
        try:
            config = {**SEALED, **_BOUNDS}
            with duckdb.connect(f"{folder}/tables.duckdb", config=config) as connection:
                connection.execute("SET GLOBAL TimeZone = 'UTC'")
                yield Decisions(connection)
        except duckdb.Error as error:
            reason = f"cannot hold the counts: {str(error).splitlines()[0]}"
            fix = "set TMPDIR to a folder with more room"
            raise StorageError(f"{folder}: {reason}; {fix}") from error


def _columns(rule: FilterRule, by: Sequence[Group]) -> dict[str, str]:
    """What is computed of each document, as SQL: what decides about it, and its tokens.

    A question that was not asked because of its condition did not fail: its answer is null.
    """
    answered = f"in ({quoted(OK)}, {quoted(TRUNCATED)}, {quoted(SKIPPED)})"
    statuses = ["status", *(named(task, "status") for task in rule.tasks)]
    failed = (f"case when {s} {answered} then null else {s} end" for s in statuses)
    scored = [task for task in rule.tasks if rule.score and task in rule.score.columns]
    asked = (f"{named(task, 'status')} <> {quoted(SKIPPED)}" for task in scored)
    read = [
        named(field.name, "n_tokens")
        for field in rule.schema
        if pa.types.is_struct(field.type)
        and field.name != INPUT
        and field.type.get_field_index("n_tokens") >= 0
    ]
    columns = {
        "_tokens": f"greatest({', '.join(['0', *read])})",
        "_failed": f"coalesce({', '.join(failed)})",
        "_ranked": f"_failed is null and {' and '.join([*asked, 'true'])}",
        "_group": " || ', ' || ".join(group.group for group in by) or quoted(ALL),
    }
    for number, condition in enumerate(rule.conditions.values()):
        columns[f"_keep_{number}"] = f"TRY({condition.text})"
    if rule.score is not None:
        columns["_score"] = rule.score.number
        columns["_part"] = "''" if rule.group is None else rule.group.group
    return columns


def _limits(part: str, share: float) -> str:
    """A query: of each part of the scores, its number of scores and its threshold.

    It is the largest score that stays when at most this share of the highest goes: of n scores,
    number n - floor(n * share), as DuckDB's `quantile_disc(score, 1 - share)`. A decimal keeps it
    exact.
    """
    return f"""
        select _of, n, _score from (
            select {part} as _of, _score, count(*) over (partition by _of) as n,
                row_number() over (partition by _of order by _score) as place
            from answers where _ranked
        ) where place = n - floor(n * {Decimal(str(share)):f})
    """


def _thresholds(table: Decisions, top: DropTopSpec) -> Thresholds:
    """The thresholds of `drop_top`, exact over all rows; SpecError if a row has no score."""
    without = "select doc_id from answers where _ranked and not coalesce(isfinite(_score), false)"
    for (doc_id,) in table.rows(f"{without} order by _shard, row limit 1"):
        fix = f"is not a finite number for document {doc_id!r}, which has an answer"
        raise SpecError([Problem(OF, f"{fix}; write coalesce(..., 0)", top.of)])
    whole = table.rows(_limits("''", top.share))
    if not whole:
        fix = "no document has a score, so there is no threshold; label first"
        raise SpecError([Problem(OF, fix, top.of)])
    own = f"n >= {top.smallest}" if top.by else "false"
    table.rows(
        f"create table thresholds as select _of as _part, _score as _of_part "
        f"from ({_limits('_part', top.share)}) where {own}"
    )
    return Thresholds(whole[0][-1], dict(table.rows("from thresholds order by _part")))


def _decisions_view(rule: FilterRule, on_error: str, thresholds: Thresholds | None) -> str:
    """The view `documents`: `answers` with the decisions.

    `on_error` alone decides about a document without an answer. A document for which `keep` is null
    is dropped, as with SQL's WHERE. `why` has the threshold and the group of `drop_top`; `reasons`
    have neither, because there may be many groups.
    """
    of_failed = "'on_error: ' || _failed" if on_error == "drop" else "null::VARCHAR"
    reasons, words = [], []
    if rule.conditions:
        verdict = "if(_kept is null, 'keep is null: ', 'keep is false: ')"
        broken = [
            f"case when _kept is not true and _keep_{n} is not distinct from _kept then {sql} end"
            for n, sql in enumerate(map(quoted, rule.conditions))
        ]
        reasons += [f"{verdict} || {condition}" for condition in broken]
        # — the verdict is written once, before the first condition
        words.append(f"{verdict} || nullif(concat_ws('; ', {', '.join(broken)}), '')")
    if rule.score is not None:
        name = quoted(f"drop_top: {rule.score.text}")
        limit = f"printf('%.{_DIGITS}g', _threshold) || if(_part = '', '', ' in ' || _part)"
        reasons.append(f"case when _is_above then {name} || ' is above its threshold' end")
        words.append(f"case when _is_above then {name} || ' > ' || {limit} end")
    return f"""
        create view documents as
        with judged as ({_judged(rule, thresholds)}),
        reasoned as (
            select *,
                if(_failed is null, _kept is not true or _is_above, {on_error == "drop"})
                    as _dropped,
                if(_failed is null, [{", ".join(reasons)}], [{of_failed}]) as _each,
                if(_failed is null, concat_ws('; ', {", ".join(words)}), {of_failed}) as _whole
            from judged
        )
        select * exclude (_each, _whole, _kept, _is_above), coalesce(_whole, '') as _why,
            [reason for reason in _each if reason is not null] as _reasons
        from reasoned
    """


def _judged(rule: FilterRule, thresholds: Thresholds | None) -> str:
    """A query: `answers` with the verdict of `keep`, and whether the score is too high."""
    kept = " and ".join(f"_keep_{n}" for n in range(len(rule.conditions))) or "true"
    if thresholds is None:
        return f"select *, {kept} as _kept, false as _is_above from answers"
    return f"""
        select *, {kept} as _kept, coalesce(_score > _threshold, false) as _is_above from (
            select answers.*, coalesce(_of_part, {number(thresholds.otherwise)}) as _threshold
            from answers left join thresholds using (_part)
        )
    """


def number(value: float) -> str:
    """The number as a literal of DuckDB, which reads one without an exponent as a decimal."""
    return repr(value) if "e" in repr(value) else f"{value!r}e0"
