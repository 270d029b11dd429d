"""What a rule would do if every answer were right: the rule itself says what should be dropped.

Entry points: `reasons_of` for the parts of a rule, each of which drops documents by itself, and
`ideal_rows` for rows whose answers are replaced by known labels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.filters.decisions import Thresholds
from pipeline.filters.rule import FilterRule
from pipeline.sources.documents import OK
from pipeline.sources.rule import Rule
from pipeline.spec.tasks import TaskSpec

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Truth = str | Collection[str] | None


@dataclass(frozen=True, slots=True)
class Reason:
    """A condition of `keep`, or `drop_top`."""

    words: str
    tasks: tuple[str, ...]  # whose answers it reads; not those that are the groups of `drop_top`
    kept: Callable[[pa.RecordBatch], Sequence[bool | None]]  # by row; None: it is null

    def drops(self, rows: pa.RecordBatch) -> Bools:  # [rows]
        """Whether it drops each row: a null condition does, as in the filter."""
        return np.array([verdict is not True for verdict in self.kept(rows)], np.bool_)


def condition(sql: str, words: str, schema: pa.Schema, tasks: Collection[str]) -> Reason:
    """The reason of documents for which this condition is not true."""
    rule = Rule(sql, schema, place="filter.keep")
    read = tuple(name for name in rule.columns if name in tasks)
    return Reason(words, read, lambda rows: list(rule.verdicts(rows).to_pylist()))


def reasons_of(rule: FilterRule, thresholds: Thresholds | None) -> tuple[Reason, ...]:
    """The conditions that `keep` joins with AND, then `drop_top`.

    Law: the rule drops a document exactly if one of them does.
    """
    reasons = [
        condition(f"({words})::BOOLEAN", words, rule.schema, rule.tasks)
        for words in rule.conditions
    ]
    if rule.score is not None and thresholds is not None:
        read = tuple(name for name in rule.score.columns if name in rule.tasks)
        kept = partial(_is_at_most, rule, thresholds)
        reasons.append(Reason(f"drop_top: {rule.score.text}", read, kept))
    return tuple(reasons)


def _is_at_most(rule: FilterRule, thresholds: Thresholds, rows: pa.RecordBatch) -> list[bool]:
    """Whether the score of each row is at most the threshold of its group, or missing."""
    assert rule.score is not None
    scores = rule.score.scores(rows).to_pylist()
    groups = [None] * len(scores) if rule.group is None else rule.group.names(rows).to_pylist()
    return [
        score is None or score <= thresholds.at.get(group, thresholds.otherwise)
        for score, group in zip(scores, groups, strict=True)
    ]


def ideal_rows(
    rows: pa.RecordBatch, truth: Mapping[str, Sequence[Truth]], tasks: Mapping[str, TaskSpec]
) -> pa.RecordBatch:
    """The rows with certain answers that are right; everything else of them stays.

    Args:
        rows: Of a snapshot.
        truth: By task, the true label of each row, or of kind `multi` all true labels; None gives
            null.
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
    answer: Mapping[str, Any], truth: str | Collection[str], task: TaskSpec, columns: Sequence[str]
) -> dict[str, Any]:
    """An answer with this label, or with these of kind `multi`, of which the model is certain."""
    true = (truth,) if isinstance(truth, str) else truth
    labels = [label for label in task.labels if label in true]
    p = {label: float(label in true) for label in task.labels}
    parts = labels[0].split(task.separator) if task.separator else []
    path = [(task.separator or "").join(parts[:end]) for end in range(1, len(parts) + 1)]
    ideal = {
        "label": truth,
        "labels": labels,
        "p": p,
        "margin": 1.0,
        "score": float(labels[0]) if task.kind == "score" else None,
        "top": [{"label": truth, "p": 1.0}],
        "levels": [{"label": part, "p": 1.0} for part in path],
        "mass": 1.0,
        "status": OK,
    }
    return {name: ideal.get(name, answer.get(name)) for name in columns}


def dropping_labels(
    reasons: Sequence[Reason], schema: pa.Schema, task: TaskSpec
) -> NDArray[np.int64]:
    """The numbers of the labels that are a reason to drop a document, whatever else is known.

    Of kind `multi`: of a document to which no other label applies.
    """
    is_multi = task.kind == "multi"
    truth = [(label,) if is_multi else label for label in task.labels]
    return np.flatnonzero(_dropped(reasons, schema, task, truth))


def drop_probabilities(
    p: Floats,  # [rows, labels]
    reasons: Sequence[Reason],
    schema: pa.Schema,
    task: TaskSpec,
) -> Floats:  # [rows]
    """An estimate of the probability that the task's answer is a reason to drop each row.

    Of kind `multi`, the labels are taken to be independent of each other, and one label to be
    enough: to drop the document, or to keep one that is dropped without any label.
    """
    dropping = dropping_labels(reasons, schema, task)
    if task.kind != "multi":
        return np.asarray(np.minimum(p[:, dropping].sum(axis=1), 1), np.float64)
    [without_any] = _dropped(reasons, schema, task, [()])
    own = np.setdiff1d(np.arange(len(task.labels)), dropping) if without_any else dropping
    none = np.asarray((1 - p[:, own]).prod(axis=1), np.float64)
    return none if without_any else 1 - none


def _dropped(
    reasons: Sequence[Reason], schema: pa.Schema, task: TaskSpec, truth: Sequence[Truth]
) -> Bools:  # [truth]
    """Whether an answer of this task, without any other, is a reason to drop."""
    nulls = [pa.nulls(len(truth), field.type) for field in schema]
    rows = pa.RecordBatch.from_arrays(nulls, schema=schema)
    rows = ideal_rows(rows, {task.name: truth}, {task.name: task})
    own = [reason.kept(rows) for reason in reasons if task.name in reason.tasks]
    return np.array([any(kept[n] is False for kept in own) for n in range(len(truth))], np.bool_)
