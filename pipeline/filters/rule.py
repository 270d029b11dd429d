"""The rule that keeps a document: one boolean SQL expression over the columns of `open_labels`.

Knows SQL, and DuckDB shut off from files, networks and settings. Knows nothing of where the rows
come from or of what becomes of a document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import duckdb
import pyarrow as pa

from pipeline.errors import Problem, SpecError

PLACE = "filter.keep"
# No task's name begins so: `toxic.label` cannot mean a column of the table.
TABLE = "_documents"
SEALED = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "lock_configuration": "true",
    "threads": "1",
}
# Kinds of DuckDB's parse tree: what computes one value of one row, and of nothing else.
EXPRESSIONS = frozenset(
    [
        "BETWEEN",
        "CASE",
        "CAST",
        "COLLATE",
        "COLUMN_REF",
        "COMPARISON",
        "CONJUNCTION",
        "CONSTANT",
        "FUNCTION",
        "OPERATOR",
        "TYPE",
    ]
)
# Macros may hold anything, so only these are let through.
MACROS = frozenset({"nullif", "if", "split_part", "list_max", "list_min", "list_sum", "list_avg"})
# DuckDB says that their values follow from their arguments, but they ask the clock: `age` where it
# has one argument.
CLOCKS = frozenset({"age", "current_localtime", "current_localtimestamp"})


class Rule:
    """A rule that was parsed, bound to the columns and seen to give a boolean; else SpecError."""

    def __init__(self, keep: str, schema: pa.Schema) -> None:
        self.keep = keep
        self._connection = duckdb.connect(":memory:", config=dict(SEALED))
        try:
            found = [node for node in _nodes(self._parsed()) if "class" in node]
        except RecursionError as error:
            raise self._wrong("is nested too deeply; write it flatter") from error
        names = {name.lower(): name for name in schema.names}
        self._refuse_kinds(found)
        self._refuse_functions(found)
        used = {node["column_names"][0].lower() for node in found if "column_names" in node}
        if unknown := sorted(used - set(names)):
            raise self._wrong(f"no column {unknown[0]!r}; there are {', '.join(schema.names)}")
        self.columns = tuple(name for name in schema.names if name.lower() in used)
        self._bind(schema)

    def verdicts(self, rows: pa.RecordBatch) -> pa.BooleanArray:
        """Of each row whether it is kept; null where the rule has no answer."""
        verdicts = self._evaluated(pa.Table.from_batches([rows])).column("keep")
        assert len(verdicts) == rows.num_rows, (len(verdicts), rows.num_rows)
        return verdicts.combine_chunks()

    def _evaluated(self, rows: pa.Table) -> pa.Table:
        # — a cursor of its own: any number of threads may ask
        with self._connection.cursor() as cursor:
            cursor.register(TABLE, rows)
            try:
                relation = cursor.sql(f"SELECT (\n{self.keep}\n) AS keep FROM {TABLE}")
                return relation.to_arrow_table()
            except duckdb.Error as error:
                raise self._wrong(_said(error)) from error

    def _bind(self, schema: pa.Schema) -> None:
        empty = self._evaluated(schema.empty_table())
        kind = empty.schema.field("keep").type
        if kind != pa.bool_():
            raise self._wrong(f"is {kind} and not true or false; compare it with something")
        assert empty.num_rows == 0, empty  # an aggregate would have a row

    def _parsed(self) -> dict[str, Any]:
        """The one expression; nothing else may stand in the statement that is made of it."""
        serialised, frame = (self._tree(f"SELECT (\n{e}\n)") for e in (self.keep, "true"))
        if serialised.get("error"):
            said = str(serialised.get("error_message", "it cannot be read")).splitlines()[0]
            raise self._wrong(f"is not one SQL expression: {said}")
        expressions = [_taken_out(tree) for tree in (serialised, frame)]
        if serialised != frame or len(expressions[0]) != 1:
            raise self._wrong("is more than one SQL expression; write one condition alone")
        expression: dict[str, Any] = expressions[0][0]
        return expression

    def _tree(self, statement: str) -> dict[str, Any]:
        query = "SELECT json_serialize_sql(?)"
        try:
            row = self._connection.execute(query, [statement]).fetchone()
        except duckdb.Error as error:
            raise self._wrong(_said(error)) from error
        assert row is not None
        tree: dict[str, Any] = json.loads(row[0])
        return tree

    def _refuse_kinds(self, nodes: list[dict[str, Any]]) -> None:
        for kind in (node["class"] for node in nodes):
            if kind not in EXPRESSIONS:
                raise self._wrong(
                    f"has a {kind.lower()}; write what follows from one document's own columns"
                )

    def _refuse_functions(self, nodes: list[dict[str, Any]]) -> None:
        """SpecError for whatever is no function, or gives another value the next time."""
        query = "SELECT function_type, stability FROM duckdb_functions() WHERE function_name = ?"
        for node in nodes:
            if node["class"] != "FUNCTION" or node["function_name"] in MACROS:
                continue
            name = node["function_name"]
            kinds = self._connection.execute(query, [name]).fetchall()
            pure = kinds and all(kind == ("scalar", "CONSISTENT") for kind in kinds)
            if not pure or name.lower() in CLOCKS:
                raise self._wrong(f"{name}() is no function of one document's own columns")

    def _wrong(self, fix: str) -> SpecError:
        return SpecError([Problem(PLACE, fix, self.keep)])


def _nodes(value: object) -> Iterator[dict[str, Any]]:
    """The mapping and all mappings in it."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from _nodes(each)
    elif isinstance(value, list):
        for each in value:
            yield from _nodes(each)


def _taken_out(tree: dict[str, Any]) -> list[Any]:
    """The statement's expressions, which then has none; and no places, which differ."""
    expressions: list[Any] = []
    if len(tree["statements"]) == 1 and "node" in tree["statements"][0]:
        expressions = tree["statements"][0]["node"].pop("select_list", [])
    for node in _nodes(tree):
        node.pop("query_location", None)
        node.pop("query_location_length", None)
    return expressions


def _said(error: duckdb.Error) -> str:
    """DuckDB's first line, and its second where it tells the names that there are."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2] if len(lines) > 1 and "andidate" in lines[1] else lines[:1])
