"""A rule that chooses documents: one boolean SQL expression over the columns of one document.

Entry point: `Rule`. DuckDB evaluates the rule without access to files, networks or settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import duckdb
import pyarrow as pa

from pipeline.errors import Problem, SpecError

SEALED = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "lock_configuration": "true",
    "threads": "1",
}
# Classes in DuckDB's parse tree of what reads other documents.
REFUSED = ("SUBQUERY", "WINDOW")
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
        self._connection = duckdb.connect(":memory:", config=dict(SEALED))
        self._expression, _ = _parsed(self._connection, keep, place)
        nulls = [pa.nulls(PROBE_ROWS, field.type) for field in schema]
        self.verdicts(pa.RecordBatch.from_arrays(nulls, schema=schema))
        self.columns = tuple(name for name in schema.names if self._reads(name, schema))

    def verdicts(self, rows: pa.RecordBatch) -> pa.BooleanArray:
        """For each row whether it is kept; null where the rule is null.

        SpecError if the verdicts change when the rule is evaluated again with the rows reversed.
        """
        table = pa.Table.from_batches([rows])
        verdicts, reversed_verdicts = self._evaluate(table), self._evaluate(table[::-1])
        if not verdicts.equals(reversed_verdicts[::-1]):
            raise self._wrong(
                "gives another value when it is evaluated again; write a condition that depends "
                "on the columns of one document only"
            )
        return verdicts

    def _reads(self, column: str, schema: pa.Schema) -> bool:
        """Whether the rule cannot be bound without the column."""
        others = pa.schema([field for field in schema if field.name != column])
        with self._connection.cursor() as cursor:
            try:
                cursor.from_arrow(others.empty_table()).select(self._expression)
            except duckdb.Error:
                return True
        return False

    def _evaluate(self, rows: pa.Table) -> pa.BooleanArray:
        # — each call has its own cursor, because several threads share the rule
        with self._connection.cursor() as cursor:
            try:
                documents = cursor.from_arrow(rows).set_alias(ALIAS)
                values = documents.select(self._expression).to_arrow_table()
            except duckdb.Error as error:
                columns = ", ".join(rows.column_names)
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

    def _wrong(self, fix: str) -> SpecError:
        return SpecError([Problem(self._place, fix, self.keep)])


def names_in(keep: str, *, place: str) -> tuple[str, ...]:
    """The columns that a rule names, whether or not a file has them; SpecError as of `Rule`."""
    with duckdb.connect(":memory:", config=dict(SEALED)) as connection:
        _, tree = _parsed(connection, keep, place)
    return tuple(dict.fromkeys(_names(tree)))


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
    return expression, json.loads(row[0])


def _names(tree: Any) -> Iterator[str]:
    """The first part of each column's name in a parse tree of DuckDB."""
    if isinstance(tree, dict) and tree.get("class") == "COLUMN_REF":
        yield tree["column_names"][0]
    elif isinstance(tree, dict | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _names(part)


def _reason(error: duckdb.Error) -> str:
    """DuckDB's first line, and its second line where that lists the valid names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2] if len(lines) > 1 and "andidate" in lines[1] else lines[:1])
