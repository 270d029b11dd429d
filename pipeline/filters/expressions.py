"""The values of a policy's clauses, and the parts and the probabilities that a rule names.

Entry points: `Score`, `Group`, `conjuncts`, `probabilities_in`.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.sources.rule import (
    Expression,
    one_line,
    parsed,
    references,
    sql_of,
    whole,
)

# The group of documents without a value.
NO_GROUP = "null"


class Score(Expression):
    """An expression that is a number."""

    def scores(self, rows: pa.RecordBatch) -> NDArray[np.float64]:  # [rows]
        """The number of each row; NaN where there is none."""
        values = self.values(rows, "DOUBLE").to_numpy(zero_copy_only=False)
        return np.asarray(values, np.float64)

    def _check(self, kind: pa.DataType) -> None:
        is_number = pa.types.is_floating(kind) or pa.types.is_integer(kind)
        if not (is_number or pa.types.is_decimal(kind)):
            raise self._wrong(f"is {kind}, not a number; name a probability, such as task.p.label")


class Group(Expression):
    """An expression whose values, as texts, are the names of groups."""

    def names(self, rows: pa.RecordBatch) -> list[str]:  # [rows]
        """The group of each row."""
        return [NO_GROUP if v is None else v for v in self.values(rows, "VARCHAR").to_pylist()]

    def _check(self, kind: pa.DataType) -> None:
        if pa.types.is_nested(kind):
            raise self._wrong(
                "has several values; name one, such as toxic.label, or a condition, such as "
                "list_contains(topic.labels, 'law')"
            )


def conjuncts(text: str, *, place: str) -> tuple[str, ...]:
    """The conditions that a rule joins with AND, each as SQL; a rule without AND is the only one.

    The rule is true where all of them are, false where one is false, and null elsewhere: the logic
    of SQL. SpecError as of `Rule`.
    """
    tree = parsed(text, place)
    node = whole(tree)
    parts = node["children"] if node["type"] == "CONJUNCTION_AND" else []
    return tuple(sql_of(text, tree, part) for part in parts) or (one_line(text, place=place),)


def probabilities_in(text: str, *, place: str) -> list[tuple[str, str]]:
    """The probabilities that an expression names, by task and label; SpecError as of `Rule`."""
    named = references(parsed(text, place))
    return [(names[0], names[2]) for names in named if len(names) == 3 and names[1] == "p"]
