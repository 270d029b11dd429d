"""What a filter decides about each document of a snapshot: a table of DuckDB, and counts of it.

Entry point: `decided`. The labels are read once. The table is in a temporary file, so it may be
larger than the memory; it has no texts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import chain
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import Problem, SpecError, StorageError
from pipeline.filters.inputs import INPUT
from pipeline.filters.rule import OF, FilterRule, failed_status
from pipeline.spec.filters import DropTopSpec

OTHERS = "others"
MOST_GROUPS = 200  # the largest; the others are counted together
# What does not fit is written to a temporary folder. Each thread needs some of the memory.
_BOUNDS: dict[str, str | int | float | list[str]] = {"memory_limit": "512MB", "threads": 4}
_DIGITS = 6  # of a threshold in the reason of a dropped document; `Thresholds` have all of them

# More columns of the table, of these rows.
Columns = Callable[[pa.RecordBatch], Mapping[str, pa.Array]]


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
    """The table `documents`: a row for each document, with the decision about it.

    Its columns: `shard` (a number), `row`, `n_chars`, `tokens`, `failed` (a status, or null),
    `ranked` (whether it counts for thresholds), `keep_N` (whether condition N is true); with
    `drop_top` also `score`, `part` (the group) and `threshold`; `dropped`, `reasons` (a list) and
    `why` (the reasons in words, with thresholds; '' where it is kept); and those asked for.
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

    def add(self, name: str, rows: pa.Table) -> None:
        """Adds rows to the table of this name."""
        self.connection.register("added", rows)
        self.connection.execute(f"create table if not exists {name} as from added with no data")
        self.connection.execute(f"insert into {name} from added")

    def of_shard(self, number: int) -> pa.Table:  # [docs of the shard]
        """`dropped` and `why` of the documents of a shard, in their order."""
        query = "select dropped, why from documents where shard = ? order by row"
        return self.table(query, [number])

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
        return self.sizes("''").get("", (Size(), Size()))

    @property
    def several(self) -> int:
        """The documents with more than one reason: they are in the counts of each."""
        [(count,)] = self.rows("select count(*) from documents where len(reasons) > 1")
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
def decided(
    rule: FilterRule,
    shards: Iterable[pa.RecordBatch],
    on_error: str,
    columns: Columns = lambda _: {},
) -> Iterator[Decisions]:
    """The decisions about all documents of these shards.

    Args:
        rule: Of the filter.
        shards: Their rows, with the rule's schema.
        on_error: What the filter does with documents without an answer; `fail` keeps them.
        columns: More columns.

    Raises:
        SpecError: A row that did not fail has no score, or no row has one.
        StorageError: The table cannot be written.
    """
    nothing = pa.RecordBatch.from_pylist([], rule.schema)  # — a snapshot may have no shard
    with scratch() as table:
        for number, rows in enumerate(chain([nothing], shards), start=-1):
            table.add("answers", pa.table({**_answers(rule, rows, number), **columns(rows)}))
        top = rule.filter.drop_top
        thresholds = None if top is None else _thresholds(table, top)
        table.rows(_decisions_view(rule, on_error, thresholds))
        yield replace(table, thresholds=thresholds)


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


def _answers(rule: FilterRule, rows: pa.RecordBatch, shard: int) -> dict[str, pa.Array]:
    """What decides about the documents of a shard, and their sizes."""
    failed = failed_status(rows, rule.tasks)
    ranked = pc.and_(pc.is_null(failed), rule.asked(rows))
    columns = {
        "shard": pa.array([shard] * rows.num_rows, pa.int32()),
        "row": rows.column("row"),
        "n_chars": rows.column("n_chars"),
        "tokens": _tokens(rows),
        "failed": failed,
        "ranked": ranked,
    }
    for number, condition in enumerate(rule.conditions.values()):
        columns[f"keep_{number}"] = condition.verdicts(rows)
    if rule.score is not None:
        columns["score"] = scores = rule.score.scores(rows)
        has_no_score = pc.and_(ranked, pc.invert(pc.fill_null(pc.is_finite(scores), False)))
        if pc.any(has_no_score).as_py():
            doc_id = rows.column("doc_id").filter(has_no_score)[0].as_py()
            fix = f"is not a finite number for document {doc_id!r}, which has an answer"
            raise SpecError([Problem(OF, f"{fix}; write coalesce(..., 0)", rule.score.text)])
        of_all = pa.array([""] * rows.num_rows, pa.string())
        columns["part"] = of_all if rule.group is None else rule.group.names(rows)
    return columns


def _tokens(rows: pa.RecordBatch) -> pa.Array:  # [rows]
    """The tokens that the task which reads most reads of each document."""
    read = [pa.array([0] * rows.num_rows, pa.int32())]
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        has_answers = name != INPUT and pa.types.is_struct(column.type)
        if has_answers and column.type.get_field_index("n_tokens") >= 0:
            read.append(pc.struct_field(column, "n_tokens"))
    return pc.max_element_wise(*read)


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


def _thresholds(table: Decisions, top: DropTopSpec) -> Thresholds:
    """The thresholds of `drop_top`, exact over all rows; SpecError if no row has a score."""
    whole = table.rows(limits("(select '' as part, score from answers where ranked)", [top.share]))
    if not whole:
        fix = "no document has a score, so there is no threshold; label first"
        raise SpecError([Problem(OF, fix, top.of)])
    scores = "(select part, score from answers where ranked)"
    groups = table.rows(f"{limits(scores, [top.share])} order by part") if top.by else []
    at = {name: threshold for name, size, _, threshold in groups if size >= top.smallest}
    columns = pa.array([*at], pa.string()), pa.array([*at.values()], pa.float64())
    table.add("thresholds", pa.table(columns, ["part", "of_part"]))
    return Thresholds(whole[0][-1], at)


def _decisions_view(rule: FilterRule, on_error: str, thresholds: Thresholds | None) -> str:
    """The view `documents`: `answers` with the decisions.

    `on_error` alone decides about a document without an answer. A document for which `keep` is null
    is dropped, as with SQL's WHERE. `why` has the threshold and the group of `drop_top`; `reasons`
    have neither, because there may be many groups.
    """
    of_failed = "'on_error: ' || failed" if on_error == "drop" else "null::VARCHAR"
    reasons, words = [], []
    if rule.conditions:
        verdict = "if(kept is null, 'keep is null: ', 'keep is false: ')"
        broken = [
            f"case when kept is not true and keep_{n} is not distinct from kept then {sql} end"
            for n, sql in enumerate(map(quoted, rule.conditions))
        ]
        reasons += [f"{verdict} || {condition}" for condition in broken]
        # — of several conditions, the first one has the verdict
        words.append(f"{verdict} || nullif(concat_ws('; ', {', '.join(broken)}), '')")
    if rule.score is not None:
        name = quoted(f"drop_top: {rule.score.text}")
        limit = f"printf('%.{_DIGITS}g', threshold) || if(part = '', '', ' in ' || part)"
        reasons.append(f"case when is_above then {name} || ' is above its threshold' end")
        words.append(f"case when is_above then {name} || ' > ' || {limit} end")
    return f"""
        create view documents as
        with judged as ({_judged(rule, thresholds)}),
        reasoned as (
            select *,
                if(failed is null, kept is not true or is_above, {on_error == "drop"}) as dropped,
                if(failed is null, [{", ".join(reasons)}], [{of_failed}]) as each,
                if(failed is null, concat_ws('; ', {", ".join(words)}), {of_failed}) as whole
            from judged
        )
        select * exclude (each, whole, kept, is_above), coalesce(whole, '') as why,
            [reason for reason in each if reason is not null] as reasons
        from reasoned
    """


def _judged(rule: FilterRule, thresholds: Thresholds | None) -> str:
    """A query: `answers` with the verdict of `keep`, and whether the score is too high."""
    kept = " and ".join(f"keep_{n}" for n in range(len(rule.conditions))) or "true"
    if thresholds is None:
        return f"select *, {kept} as kept, false as is_above from answers"
    return f"""
        select *, {kept} as kept, coalesce(score > threshold, false) as is_above from (
            select answers.*, coalesce(of_part, {number(thresholds.otherwise)}) as threshold
            from answers left join thresholds using (part)
        )
    """


def quoted(text: str) -> str:
    """The text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def number(value: float) -> str:
    """The number as a literal of DuckDB, which reads one without an exponent as a decimal."""
    return repr(value) if "e" in repr(value) else f"{value!r}e0"
