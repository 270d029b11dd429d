"""The rows of `open_labels` with one flat column for each value: `toxic`, `toxic_p_clean`, ...

Entry points: `flat_columns` names the columns, `flatten` makes the rows; `json_values` and
`csv_rows` are for files, and `restore_formulas` for what is read of CSV files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Annotated, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import InstanceOf, PlainSerializer

from pipeline.ledger.columns import LABELS_TYPE
from pipeline.ledger.rows import INPUT, TEXT_COLUMN

# The start of a formula: https://owasp.org/www-community/attacks/CSV_Injection. With apostrophes
# before it, it is one that was defused.
_FORMULA = r"('*[=+\-@\t\r])"
NO_LABEL = "-"  # in a CSV file, where none of several labels applies


@dataclass(frozen=True, slots=True)
class FlatColumn:
    """A flat column: its name, and where its values are in a row of `open_labels`."""

    name: str
    source: tuple[str, ...]  # ("toxic", "p", "clean")
    type: Annotated[InstanceOf[pa.DataType], PlainSerializer(str)]


def flat_columns(schema: pa.Schema) -> tuple[FlatColumn, ...]:
    """The columns for the rows of a schema of `open_labels`, which may also have the text.

    A name is the parts of its source joined by underscores. The `label` or `labels` of a task has
    its name: `toxic` is the answer to the task `toxic`. Law: no two names are equal, also without
    regard to case. Where they would be, the columns of documents come first, then the answers of
    tasks, then the rest in order; the others end in `_2`, `_3`, ...
    """
    leaves = [leaf for field in schema for leaf in _leaves((field.name,), field.type)]

    def rank(leaf: tuple[tuple[str, ...], pa.DataType]) -> int:
        source, _ = leaf
        return 0 if len(source) == 1 else 1 if _is_answer(source) else 2

    names: dict[tuple[str, ...], str] = {}
    taken: set[str] = set()
    for source, _ in sorted(leaves, key=rank):
        name = _name(source)
        numbered = (f"{name}_{number}" for number in count(2))
        while name.casefold() in taken:
            name = next(numbered)
        taken.add(name.casefold())
        names[source] = name
    return tuple(FlatColumn(names[source], source, kind) for source, kind in leaves)


Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)


def flatten(rows: Rows, columns: tuple[FlatColumn, ...]) -> Rows:
    """The rows with these columns, which `flat_columns` named for their schema."""
    arrays = []
    for column in columns:
        root, *parts = column.source
        values = rows.column(root)
        arrays.append(pc.struct_field(values, parts) if parts else values)
    flat: Rows = type(rows).from_arrays(arrays, schema=flat_schema(columns))
    return flat


def flat_schema(columns: tuple[FlatColumn, ...]) -> pa.Schema:
    """The Arrow schema of the columns."""
    return pa.schema([(column.name, column.type) for column in columns])


def json_values(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows as JSON has them: a float32 in its few digits, and null for NaN."""
    columns = [_in_few_digits(column) for column in rows.columns]
    return pa.RecordBatch.from_arrays(columns, rows.schema.names)


def csv_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows for a CSV file: lists are JSON, those of labels one text; no text is a formula."""
    columns = []
    for values in rows.columns:
        texts = values
        if values.type == LABELS_TYPE:
            texts = joined_labels(values)
        elif pa.types.is_list(values.type):
            lists = _in_few_digits(values).to_pylist()
            written = (None if v is None else json.dumps(v, ensure_ascii=False) for v in lists)
            texts = pa.array(written, pa.string())
        is_text = texts.type in (pa.string(), pa.large_string())
        columns.append(defuse_formulas(texts) if is_text else texts)
    return pa.RecordBatch.from_arrays(columns, rows.schema.names)


def defuse_formulas(texts: pa.Array) -> pa.Array:
    """The texts for a CSV file: one more apostrophe before each that a spreadsheet would run.

    A `-` alone is not a formula. Law: `restore_formulas` returns the texts as they were, whatever
    they begin with.
    """
    defused = pc.replace_substring_regex(texts, f"^{_FORMULA}", r"'\1")
    return pc.if_else(pc.equal(texts, NO_LABEL), texts, defused)


def joined_labels(labels: pa.Array) -> pa.StringArray:
    """The lists of labels as texts: `law;art`, and `-` for none.

    A list with a label that such a text cannot show is JSON.
    """
    texts = [None if row is None else _joined(row) for row in labels.to_pylist()]
    return pa.array(texts, pa.string())


def _joined(labels: list[str]) -> str:
    if any(";" in label or label[:1] == "[" or label == NO_LABEL for label in labels):
        return json.dumps(labels, ensure_ascii=False)
    return ";".join(labels) or NO_LABEL


def restore_formulas(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """The texts without the apostrophe of `defuse_formulas`."""
    return pc.replace_substring_regex(texts, f"^'{_FORMULA}", r"\1")


def _leaves(
    source: tuple[str, ...], kind: pa.DataType
) -> Iterator[tuple[tuple[str, ...], pa.DataType]]:
    if not pa.types.is_struct(kind):
        yield source, kind
        return
    for field in kind:
        yield from _leaves((*source, field.name), field.type)


def _name(source: tuple[str, ...]) -> str:
    if source == (TEXT_COLUMN,):
        return TEXT_COLUMN.lstrip("_")
    return "_".join(source[:-1] if _is_answer(source) else source)


def _is_answer(source: tuple[str, ...]) -> bool:
    # — a label of a task may be called `label`, too: its probability is below `p`
    return source[0] != INPUT and source[1:] in (("label",), ("labels",))


def _in_few_digits(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """0.1 in place of 0.10000000149011612: the shortest text that is the same float32."""
    short = values.cast(_with_floats(values.type, pa.string()))
    numbers = short.cast(_with_floats(values.type, pa.float64()))
    if not pa.types.is_floating(numbers.type):
        return numbers
    return pc.if_else(pc.is_finite(numbers), numbers, pa.scalar(None, pa.float64()))


def _with_floats(kind: pa.DataType, number: pa.DataType) -> pa.DataType:
    """The type with another in place of float32."""
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_with_floats(kind.value_type, number)))
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_with_floats(f.type, number)) for f in kind])
    return number if kind == pa.float32() else kind
