"""What a rule would do if every answer were right: the rule itself says what should be dropped.

Entry points: `reasons_of` for the parts of a rule, each of which drops documents by itself, and
`ideal_rows` for rows whose answers are replaced by known labels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.filters.policy import BoundClause, Policy
from pipeline.ledger.columns import CALIBRATED, CALIBRATED_COLUMNS
from pipeline.sources.documents import OK
from pipeline.sources.rule import Rule, conjuncts
from pipeline.spec.tasks import TaskSpec

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Reason:
    """A condition of `keep`, or a clause."""

    words: str
    tasks: tuple[str, ...]  # whose answers it reads; not those that are a clause's groups
    kept: Callable[[pa.RecordBatch], Sequence[bool | None]]  # by row; None: it is null

    def drops(self, rows: pa.RecordBatch) -> Bools:  # [rows]
        """Whether it drops each row: a null condition does, as in the filter."""
        return np.array([verdict is not True for verdict in self.kept(rows)], np.bool_)


def condition(sql: str, words: str, schema: pa.Schema, tasks: Collection[str]) -> Reason:
    """The reason of documents for which this condition is not true."""
    rule = Rule(sql, schema, place="filter.keep")
    read = tuple(name for name in rule.columns if name in tasks)
    return Reason(words, read, lambda rows: list(rule.verdicts(rows).to_pylist()))


def reasons_of(policy: Policy, schema: pa.Schema, tasks: Collection[str]) -> tuple[Reason, ...]:
    """The conditions that `keep` joins with AND, then the clauses.

    Law: the policy drops a document exactly if one of them does.

    Args:
        policy: With thresholds.
        schema: The rows' columns, with those of the input.
        tasks: The names of all tasks.
    """
    parts = conjuncts(policy.keep, place="filter.keep") if policy.keep else ()
    conditions = [condition(part, part, schema, tasks) for part in dict.fromkeys(parts)]
    clauses = []
    for clause in policy.clauses:
        bound = BoundClause(clause, schema)
        read = tuple(name for name in bound.expressions[0].columns if name in tasks)
        clauses.append(Reason(f"{clause.kind}: {clause.of}", read, bound.kept))
    return (*conditions, *clauses)


def ideal_rows(
    rows: pa.RecordBatch, truth: Mapping[str, Sequence[str | None]], tasks: Mapping[str, TaskSpec]
) -> pa.RecordBatch:
    """The rows with certain answers that are right; everything else of them stays.

    Args:
        rows: Of a snapshot.
        truth: By task, the true label of each row; None gives null.
        tasks: The spec's, by name.
    """
    for name, labels in truth.items():
        index = rows.schema.get_field_index(name)
        field = rows.schema.field(index)
        columns = [child.name for child in field.type]
        answers = [
            None if label is None else _ideal(answer or {}, label, tasks[name], columns)
            for answer, label in zip(rows.column(index).to_pylist(), labels, strict=True)
        ]
        rows = rows.set_column(index, field, pa.array(answers, field.type))
    return rows


def _ideal(
    answer: Mapping[str, Any], label: str, task: TaskSpec, columns: Sequence[str]
) -> dict[str, Any]:
    """An answer with this label, of which the model is certain."""
    p = {other: float(other == label) for other in task.labels}
    best = dict(zip(CALIBRATED_COLUMNS, (label, p, 1.0), strict=True))
    parts = label.split(task.separator) if task.separator else []
    path = [(task.separator or "").join(parts[:end]) for end in range(1, len(parts) + 1)]
    ideal = {
        **best,
        CALIBRATED: best,
        "top": [{"label": label, "p": 1.0}],
        "levels": [{"label": part, "p": 1.0} for part in path],
        "mass": 1.0,
        "status": OK,
    }
    return {name: ideal.get(name, answer.get(name)) for name in columns}


def dropping_labels(
    reasons: Sequence[Reason], schema: pa.Schema, task: TaskSpec
) -> NDArray[np.int64]:
    """The numbers of the labels that are a reason to drop a document, whatever else is known."""
    nulls = [pa.nulls(len(task.labels), field.type) for field in schema]
    rows = pa.RecordBatch.from_arrays(nulls, schema=schema)
    rows = ideal_rows(rows, {task.name: list(task.labels)}, {task.name: task})
    own = [reason.kept(rows) for reason in reasons if task.name in reason.tasks]
    return np.array([n for n in range(len(rows)) if any(kept[n] is False for kept in own)], int)
