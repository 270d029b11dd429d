"""A rule that chooses documents: one boolean SQL expression over the columns of one document.

Entry point: `Rule`. DuckDB evaluates the rule without access to files, networks, settings or the
clock, and in UTC: the same rule gives the same verdicts on every machine and day.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import duckdb
import pyarrow as pa

from pipeline.errors import Problem, SpecError
from pipeline.hashes import parse_json

SEALED = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "threads": "1",
}
# Classes in DuckDB's parse tree of what reads other documents.
REFUSED = ("SUBQUERY", "WINDOW")
# What reads the clock or a setting, and DuckDB's catalog does not say so. `age` does with one
# argument. The first line is functions; the others are written like columns.
_READS_MORE = frozenset(
    {"json_serialize_plan", "json_execute_serialized_sql"}
    | {"current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"}
    | {"current_catalog", "current_role", "current_schema", "current_user", "session_user", "user"}
)
# What errors call the rows; no task has a name that begins with an underscore.
ALIAS = "_documents"
# A rule is tried on this number of empty documents before it sees a real one.
PROBE_ROWS = 256


class Rule:
    """A rule that parses, binds to the columns and gives a boolean; SpecError if it does not.

    `place` is the key or the flag that the user wrote, for errors.
    """

    def __init__(self, keep: str, schema: pa.Schema, *, place: str) -> None:
        self.keep = keep
        self._place = place
        self._connection = _sealed()
        self._expression, tree = _parsed(self._connection, keep, place)
        if (name := _changing(tree, schema.names)) is not None:
            raise self._wrong(
                f"{name} reads the clock, a setting or a random number, so the verdicts could not "
                f"be repeated; write a constant"
            )
        nulls = [pa.nulls(PROBE_ROWS, field.type) for field in schema]
        self.verdicts(pa.RecordBatch.from_arrays(nulls, schema=schema))
        named = _names(tree)
        # — without a column `user`, the name is a keyword
        self.columns = tuple(
            name for name in schema.names if name in named or self._reads(name, schema)
        )

    def verdicts(self, rows: pa.RecordBatch) -> pa.BooleanArray:
        """For each row whether it is kept; null where the rule is null."""
        # — each call has its own cursor, because several threads share the rule
        with self._connection.cursor() as cursor:
            try:
                documents = cursor.from_arrow(pa.Table.from_batches([rows])).set_alias(ALIAS)
                values = documents.select(self._expression).to_arrow_table()
            except duckdb.Error as error:
                columns = ", ".join(rows.schema.names)
                raise self._wrong(f"{_reason(error)}; the columns are {columns}") from error
        if values.shape != (rows.num_rows, 1):
            raise self._wrong(
                f"gives {values.num_rows} x {values.num_columns} values for {rows.num_rows} "
                f"documents; write a condition on the columns of one document"
            )
        if values.schema.types != [pa.bool_()]:
            kind = values.schema.types[0]
            raise self._wrong(f"is {kind}, not a boolean; compare it with a value")
        return values.column(0).combine_chunks()

    def _reads(self, column: str, schema: pa.Schema) -> bool:
        """Whether the rule cannot be bound without the column."""
        others = pa.schema([field for field in schema if field.name != column])
        with self._connection.cursor() as cursor:
            try:
                cursor.from_arrow(others.empty_table()).select(self._expression)
            except duckdb.Error:
                return True
        return False

    def _wrong(self, fix: str) -> SpecError:
        return SpecError([Problem(self._place, fix, self.keep)])


def _sealed() -> duckdb.DuckDBPyConnection:
    """A connection that reaches nothing outside, and computes times in UTC."""
    connection = duckdb.connect(":memory:", config=dict(SEALED))
    # — global: a cursor has the settings of its own session
    connection.execute("SET GLOBAL TimeZone = 'UTC'; SET GLOBAL lock_configuration = true")
    return connection


def _changing(tree: Any, columns: list[str]) -> str | None:
    """The first function or keyword whose value depends on more than its arguments, if any."""
    for node in _nodes(tree):
        name = str(node.get("function_name", "")).lower()
        if node.get("class") == "COLUMN_REF":
            first = node["column_names"][0]
            # — of a column and a keyword with one name, DuckDB takes the column
            name = "" if first in columns else first.lower()
        is_age_until_now = name == "age" and len(node["arguments"]) == 1
        if name in _unstable() or is_age_until_now:
            return name
    return None


@cache
def _unstable() -> frozenset[str]:
    """The names of functions whose value may differ from one call or query to the next."""
    query = """SELECT DISTINCT lower(function_name) FROM duckdb_functions()
        WHERE stability <> 'CONSISTENT' OR macro_definition ILIKE '%current_%'"""
    with _sealed() as connection:
        return _READS_MORE.union(name for (name,) in connection.execute(query).fetchall())


def names_in(keep: str, *, place: str) -> tuple[str, ...]:
    """The columns that a rule names, whether or not a file has them; SpecError as of `Rule`."""
    with _sealed() as connection:
        _, tree = _parsed(connection, keep, place)
    return _names(tree)


def _parsed(
    connection: duckdb.DuckDBPyConnection, keep: str, place: str
) -> tuple[duckdb.Expression, Any]:
    """The rule as an expression, and its parse tree."""
    try:
        expression = duckdb.SQLExpression(keep)
        row = connection.execute("SELECT json_serialize_sql(?)", [f"SELECT {keep}"]).fetchone()
    except duckdb.Error as error:
        fix = f"is not one SQL expression: {_reason(error)}"
        raise SpecError([Problem(place, fix, keep)]) from error
    assert row is not None
    for kind in REFUSED:
        # — a quote inside a string of the tree is escaped, so only a node's class matches
        if f'"class":"{kind}"' in row[0]:
            fix = f"has a {kind.lower()}; write a condition on the columns of one document"
            raise SpecError([Problem(place, fix, keep)])
    try:
        return expression, parse_json(row[0])
    except ValueError as error:
        fix = "is nested too deeply; write it with fewer levels of parentheses"
        raise SpecError([Problem(place, fix, keep)]) from error


def _names(tree: Any) -> tuple[str, ...]:
    """The first part of each column's name in a parse tree of DuckDB."""
    references = (node for node in _nodes(tree) if node.get("class") == "COLUMN_REF")
    return tuple(dict.fromkeys(node["column_names"][0] for node in references))


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """All objects of a parse tree, an object before those inside it, in their order."""
    left = [tree]  # — no recursion, because a rule may be a thousand levels deep
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
        if isinstance(part, dict | list):
            left += reversed([*part.values()] if isinstance(part, dict) else part)


def _reason(error: duckdb.Error) -> str:
    """DuckDB's first line, and its second line where that lists the valid names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2] if len(lines) > 1 and "andidate" in lines[1] else lines[:1])
