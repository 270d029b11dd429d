"""SQL expressions over the columns of one document, such as a rule that chooses documents.

Entry points: `Rule`; `names_in`, `fields_in` and `one_line` for the text of an expression. They
call only the functions of `functions`. DuckDB evaluates them without access to files, networks,
settings or the clock, and in UTC: they give the same values on every machine and day.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import cache
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from pipeline.errors import Problem, SpecError, listed
from pipeline.hashes import parse_json
from pipeline.sources.functions import nodes_of, refusal

SEALED = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "threads": "1",
}
# What errors call the rows; no task has a name that begins with an underscore.
ALIAS = "_documents"
# Columns of documents beside which those of the input are fields of `doc`.
_OF_DOCUMENTS = {"doc_id", "n_chars"}
# What may not be inside a sentence; also found in a string, where it does no harm.
_COMMENT_OR_LINE = re.compile(r"--|/\*|\n")


class Expression:
    """An expression that parses and binds to the columns; SpecError if it does not.

    `place` is the key or the option that the user wrote, for errors.
    """

    def __init__(self, text: str, schema: pa.Schema, *, place: str) -> None:
        self.text = text
        self._place, self._schema = place, schema
        tree = parsed(text, place)
        structs = [field.type.names for field in schema if pa.types.is_struct(field.type)]
        for names in (schema.names, *structs):
            lower = [
                name.encode().lower() for name in names
            ]  # — DuckDB ignores case of ASCII alone
            if twins := [n for n, own in zip(names, lower, strict=True) if lower.count(own) > 1]:
                raise self._wrong(f"SQL takes {listed(twins)} for one name; rename one of them")
        nulls = [pa.nulls(1, field.type) for field in schema]
        self._check(self._evaluated(pa.RecordBatch.from_arrays(nulls, schema=schema), text).type)
        columns = {name.lower(): name for name in schema.names}
        for name in _names(tree):
            # — in SQL, some functions that read the clock or a setting look like columns:
            # `current_date`
            if name.lower() not in columns:
                fix = f"{name} is not a column; write a constant; the columns are "
                raise self._wrong(fix + listed(schema.names))
        named = {name.lower() for name in _names(tree)}
        self.columns = tuple(own for name, own in columns.items() if name in named)

    def failures(self, rows: pa.RecordBatch) -> int:
        """How many rows have no value because a cast or a function fails; null is a value."""
        failed = self._evaluated(rows, f"TRY((\n{self.text}\n) IS NULL) IS NULL")
        return int(np.count_nonzero(failed.to_numpy(zero_copy_only=False)))

    def check_on(self, rows: pa.RecordBatch) -> None:
        """SpecError with the reason if a row has no value because a cast or a function fails."""
        self._evaluated(rows, self.text)

    def _evaluated(self, rows: pa.RecordBatch, sql: str) -> pa.Array:  # [rows]
        # — each call has its own cursor, because several threads share the rule
        with _sealed().cursor() as cursor:
            try:
                documents = cursor.from_arrow(pa.Table.from_batches([rows])).set_alias(ALIAS)
                values = documents.select(duckdb.SQLExpression(sql)).to_arrow_table()
            except duckdb.Error as error:
                columns = listed(rows.schema.names)
                raise self._wrong(f"{self._reason(error)}; the columns are {columns}") from error
        return values.column(0).combine_chunks()

    def _reason(self, error: duckdb.Error) -> str:
        """Why it cannot be evaluated, and what to write where another dialect would take it."""
        names = self._schema.names
        for name, *fields in references(parsed(self.text, self._place)):
            kind = self._schema.field(name).type if names.count(name) == 1 else pa.null()
            if not fields and pa.types.is_struct(kind) and kind.get_field_index("label") >= 0:
                return f"{name} has several values; write {name}.label for the answer"
            if name not in names and {*names} >= _OF_DOCUMENTS:
                return f"{_reason(error)}; write doc.{name} for a column of the input"
        return _reason(error)

    def _check(self, kind: pa.DataType) -> None:
        """SpecError unless the expression may have values of this type."""

    def _wrong(self, fix: str) -> SpecError:
        return SpecError([Problem(self._place, fix, self.text)])


class Rule(Expression):
    """A boolean expression, which chooses documents."""

    def verdicts(self, rows: pa.RecordBatch) -> pa.BooleanArray:
        """For each row whether it is kept; null where the rule is null or cannot be computed."""
        return self._evaluated(rows, f"TRY(\n{self.text}\n)")

    def _check(self, kind: pa.DataType) -> None:
        if kind != pa.bool_():
            raise self._wrong(f"is {kind}, not a boolean; compare it with a value")


@cache
def _sealed() -> duckdb.DuckDBPyConnection:
    """A connection without access to files and networks, which computes times in UTC.

    It is made once, because that takes longer than most queries. It holds nothing; each query has a
    cursor of its own.
    """
    connection = duckdb.connect(":memory:", config=dict(SEALED))
    # — global: a cursor has the settings of its own session
    connection.execute("SET GLOBAL TimeZone = 'UTC'; SET GLOBAL lock_configuration = true")
    return connection


def fields_in(text: str, column: str, *, place: str) -> tuple[str, ...]:
    """The fields of a column that an expression names; SpecError as of `Rule`."""
    named = (names for names in references(parsed(text, place)) if names[0] == column)
    return tuple(dict.fromkeys(names[1] for names in named if names[1:]))


def names_in(keep: str, *, place: str) -> tuple[str, ...]:
    """The columns that a rule names, whether or not a file has them; SpecError as of `Rule`."""
    return _names(parsed(keep, place))


def one_line(text: str, *, place: str) -> str:
    """The expression without comments and line breaks; SpecError as of `Rule`."""
    if not _COMMENT_OR_LINE.search(text):
        return text
    tree = parsed(text, place)
    return sql_of(text, tree, whole(tree))


def whole(tree: Any) -> Any:
    """The node of the whole expression."""
    [node] = tree["statements"][0]["node"]["select_list"]
    return node


def sql_of(text: str, tree: Any, part: Any) -> str:
    """A part of a parse tree as SQL: as the text has it, or as DuckDB writes it."""
    start = part["query_location"] - len("SELECT ")
    length = part.get("query_location_length", 0)
    own = text.encode()[start : start + length].decode(errors="replace")
    with suppress(SpecError):  # of a piece of the text that is not SQL
        same = _without_places(whole(parsed(own, ""))) == _without_places(part)
        if same and not _COMMENT_OR_LINE.search(own):
            return own
    [statement] = tree["statements"]
    alone = {**statement, "node": {**statement["node"], "select_list": [part]}}
    query = json.dumps({**tree, "statements": [alone]})
    return str(_query("SELECT json_deserialize_sql(?::JSON)", query)).removeprefix("SELECT ")


def _without_places(node: Any) -> Any:
    """A parse tree without the positions in the text."""
    if isinstance(node, list):
        return [_without_places(child) for child in node]
    if isinstance(node, dict):
        return {k: _without_places(v) for k, v in node.items() if not k.startswith("query_loc")}
    return node


def _query(sql: str, *parameters: str) -> Any:
    """The one value of the query's first row."""
    with _sealed().cursor() as cursor:
        row = cursor.execute(sql, parameters).fetchone()
    assert row is not None, sql
    return row[0]


def parsed(text: str, place: str) -> Any:
    """The parse tree of one expression; SpecError unless a condition may have it."""
    try:
        duckdb.SQLExpression(text)
        parsed = str(_query("SELECT json_serialize_sql(?)", f"SELECT {text}"))
    except duckdb.Error as error:
        fix = f"is not one SQL expression: {_reason(error)}"
        raise SpecError([Problem(place, fix, text)]) from error
    try:
        tree = parse_json(parsed)
    except (ValueError, RecursionError) as error:
        fix = "is nested too deeply; write it with fewer levels of parentheses"
        raise SpecError([Problem(place, fix, text)]) from error
    if (refused := refusal(tree)) is not None:
        raise SpecError([Problem(place, refused, text)])
    return tree


def _names(tree: Any) -> tuple[str, ...]:
    """The first part of each column's name in a parse tree of DuckDB."""
    return tuple(dict.fromkeys(names[0] for names in references(tree)))


def references(tree: Any) -> list[list[str]]:
    """The parts of the name of each column in a parse tree, in their order."""
    return [node["column_names"] for node in nodes_of(tree) if node.get("class") == "COLUMN_REF"]


def _reason(error: duckdb.Error) -> str:
    """DuckDB's first line, and its second line where that lists the valid names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2] if len(lines) > 1 and "andidate" in lines[1] else lines[:1])


def quoted(text: str) -> str:
    """The text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def named(*parts: str) -> str:
    """A column, or a field of one, as SQL."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in parts)
