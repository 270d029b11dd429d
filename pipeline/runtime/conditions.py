"""The conditions of tasks: what a `when` may name, and which documents of a shard it accepts.

Entry points: `tasks_named` and `check_when` before a run, `accepted_by` in a worker. Must import
neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import pyarrow as pa

from pipeline.errors import Problem, SpecError
from pipeline.ledger.columns import Bools, answer_columns, answers_type
from pipeline.ledger.text_index import leading_bits
from pipeline.sources.condition import accepted, check_values, first_values
from pipeline.sources.rule import Rule, fields_in, names_in
from pipeline.sources.shards import Shard
from pipeline.sources.streams import Options
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec

DOC = "doc"  # the struct with the columns of the input
_COLUMNS = {"doc_id": pa.string(), "n_chars": pa.int64(), "sample": pa.float64()}


def tasks_named(when: str, before: Sequence[TaskSpec], *, place: str) -> list[str]:
    """The tasks that a condition names; SpecError if it names anything else than it may.

    `before` are the tasks before the one of the condition, whose answers are known by then.
    """
    tasks = [task.name for task in before]
    names = names_in(when, place=place)
    scope = [*_COLUMNS, f"{DOC}.COLUMN", *tasks]
    if unknown := [name for name in names if name not in (*_COLUMNS, DOC, *tasks)]:
        fix = f"{unknown[0]} is not in the scope of a condition, which has {', '.join(scope)}"
        raise SpecError([Problem(place, f"{fix}; a task must be one before this one", when)])
    return [name for name in tasks if name in names]


def check_when(
    when: str, before: Sequence[TaskSpec], shards: Sequence[Shard], options: Options, *, place: str
) -> None:
    """SpecError unless the condition can be bound to the first rows of the input.

    At least one of the first rows must have each column of the input that it names.
    """
    names = fields_in(when, DOC, place=place)
    parts = first_values(shards if names else (), names, options)
    lacking = [name for name in names if not any(name in part.column_names for part in parts)]
    if shards and lacking:
        fix = f"{shards[0].path} has no column {lacking[0]}; name a column of the input"
        raise SpecError([Problem(place, fix, when)])
    whole = [part for part in parts if part.num_columns == len(names)]
    check_values(whole, when, shards, place)
    schema = pa.schema([*_COLUMNS.items(), *_types(before).items()])
    if whole:
        schema = schema.append(pa.field(DOC, pa.struct(list(whole[0].schema))))
    if whole or not names:
        Rule(when, schema, place=place)


def input_names(tasks: Iterable[TaskSpec]) -> list[str]:
    """The columns of the input that the conditions of these tasks name."""
    named = (fields_in(task.when, DOC, place="when") for task in tasks if task.when is not None)
    return list(dict.fromkeys(chain.from_iterable(named)))


def accepted_by(
    spec: JobSpec,
    task: TaskSpec,
    documents: pa.Table,
    answers: Mapping[str, pa.StructArray],
    values: pa.Table | None,
) -> tuple[Bools, int]:
    """[docs]: which documents the condition of a task accepts, and how many it cannot judge.

    Args:
        spec: With the task.
        task: With a condition.
        documents: The columns of a documents file.
        answers: [docs] the rows of the label files of the tasks that the condition names.
        values: [docs] the columns of the input that conditions name; None if there are none.
    """
    assert task.when is not None, task.name
    place = spec.tasks.index(task)
    hashes = documents.column("content_hash").combine_chunks().cast(pa.string())
    columns: dict[str, pa.Array] = {
        "doc_id": documents.column("doc_id").combine_chunks(),
        "n_chars": documents.column("n_chars").combine_chunks().cast(pa.int64()),
        "sample": pa.array(leading_bits(hashes) / np.float64(2**64)),
    }
    types = _types(spec.tasks[:place])
    columns |= {name: rows.cast(types[name]) for name, rows in answers.items()}
    if values is not None and values.num_columns:
        missing = documents.num_rows - values.num_rows  # — rows that cannot be read have none
        fields = [
            pa.concat_arrays([column.combine_chunks(), pa.nulls(missing, column.type)])
            for column in values.columns
        ]
        columns[DOC] = pa.StructArray.from_arrays(fields, names=values.column_names)
    return accepted(task.when, columns, place=f"tasks.{place}.when")


def _types(tasks: Sequence[TaskSpec]) -> dict[str, pa.StructType]:
    """By task, the type of its answers in the scope of a condition."""
    return {task.name: answers_type(answer_columns(task), list(task.labels)) for task in tasks}
