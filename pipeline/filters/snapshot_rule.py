"""The rule of a spec's filter on its last snapshot. Entry point: `SnapshotRule`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import Option, Problem, SpecError
from pipeline.filters.expressions import Group
from pipeline.filters.inputs import check_columns_of, doc_field, with_inputs
from pipeline.filters.labelled import current_labels, labelled_shards, warn_of_older_answers
from pipeline.filters.policy import INPUT, Judge, Policy, group_sql
from pipeline.ledger.rows import aligned_batches, asked_rows, wide_schema
from pipeline.ledger.snapshots import Contents
from pipeline.sources.documents import OK, SKIPPED, TRUNCATED
from pipeline.sources.rule import fields_in
from pipeline.sources.shards import Shard
from pipeline.spec.filters import FilterSpec
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, open_store

ALL = "all"  # the group of a document without groups


@dataclass(frozen=True, slots=True)
class SnapshotRule:
    """A snapshot, and the rule that is applied to its rows."""

    spec: JobSpec
    filter: FilterSpec
    store: Store
    contents: Contents
    policy: Policy  # thresholds of shares are missing
    by: tuple[str, ...] = ()  # SQL of the groups that are counted, which decide nothing

    @classmethod
    def of(cls, spec: JobSpec) -> SnapshotRule:
        """The rule, after every check that needs no work."""
        if spec.filter is None:
            fix = "missing; write keep: and a condition, such as toxic.p.toxic < 0.5"
            raise SpecError([Problem("filter", fix)])
        store = open_store(spec.output, spec.storage_options)
        contents = current_labels(spec, store)
        policy = Policy.of_spec(spec.filter, contents.tasks)
        rule = cls(spec, spec.filter, store, contents, policy)
        rule.judge(policy)
        return rule

    def grouped(self, by: Sequence[str] = ()) -> SnapshotRule:
        """The rule with groups: labels of tasks, or SQL (default: the groups of the rule)."""
        by = by or [clause.by for clause in self.policy.clauses if clause.by][:1]
        whole = replace(self, by=tuple(group_sql(sql, self.contents.tasks) for sql in by))
        whole.groups()
        return whole

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns of the input that the rule and the groups read."""
        by = [name for sql in self.by for name in fields_in(sql, INPUT, place=Option("by"))]
        return tuple(dict.fromkeys((*self.policy.inputs, *by)))

    @property
    def answers_schema(self) -> pa.Schema:
        """The columns of `open_labels`, with all tasks."""
        return wide_schema(self.contents, list(self.contents.tasks))

    @property
    def schema(self) -> pa.Schema:
        """The columns of `rows`: those of the answers, and `doc` for columns of the input."""
        doc = [doc_field(self.inputs)] if self.inputs else []
        return pa.schema([*self.answers_schema, *doc])

    def judge(self, policy: Policy) -> Judge:
        """The policy, bound to the rows of this snapshot; SpecError if it does not suit them."""
        return Judge(policy, self.schema)

    def counted_task(self, judge: Judge) -> str:
        """The task whose tokens are counted. The rule reads it: others may have no answer."""
        tasks = list(self.contents.tasks)
        return next((task for task in tasks if task in judge.columns), tasks[0])

    def groups(self) -> Callable[[pa.RecordBatch], list[str]]:  # [rows]
        """A function that gives the group of each row; SpecError if the groups do not suit them.

        Without groups, it gives the same name for all rows.
        """
        groups = [Group(sql, self.schema, place=Option("by")) for sql in self.by]

        def names(rows: pa.RecordBatch) -> list[str]:
            values = zip(*(group.names(rows) for group in groups), strict=True)
            return [", ".join(of_row) for of_row in values] or [ALL] * len(rows)

        return names

    def warn_of_older_answers(self, cache_dir: Path) -> None:
        """Logs a line for each task whose answers are of another wording or model than now."""
        warn_of_older_answers(self.spec, self.store, self.contents, cache_dir)

    def input_shards(self, cache_dir: Path) -> dict[str, Shard]:
        """The snapshot's shards in the input by id.

        Raises:
            SpecError: The input does not have the columns that the rule or the groups read.
            StorageError: The input changed since it was labelled.
        """
        shards, _ = labelled_shards(self.spec, self.store, self.contents, cache_dir)
        read = [shards[named.sid] for named in self.contents.shards]
        options = self.spec.input.storage_options
        check_columns_of(read, options, self.policy.inputs, place="filter")
        check_columns_of(read, options, self.inputs, place=Option("by"))
        return shards

    def answers(self) -> Iterator[pa.RecordBatch]:
        """The rows of each shard, without columns of the input."""
        batches = aligned_batches(self.store, self.contents, self.answers_schema)
        return (asked_rows(self.contents, batch) for batch in batches)

    def rows(self, shards: Mapping[str, Shard]) -> Iterator[tuple[pa.RecordBatch, Sequence[str]]]:
        """The rows of each shard as the policy reads them, with their failed status."""
        options, columns = self.spec.input.storage_options, self.judge(self.policy).columns
        for named, answers in zip(self.contents.shards, self.answers(), strict=True):
            rows = with_inputs(answers, shards[named.sid], options, self.inputs)
            yield rows, failed_status(answers, columns)


def failed_status(answers: pa.RecordBatch, tasks: Collection[str]) -> list[str]:
    """For each document its first failed status, of reading or of these tasks; "" if none is.

    A question that was not asked because of its condition did not fail: its answer is null.
    """
    failed: NDArray[np.object_] = np.full(answers.num_rows, "", dtype=object)
    named = [answers.column(name) for name in tasks if name in answers.schema.names]
    columns = [c.field("status") for c in named if pa.types.is_struct(c.type)]
    for status in (*columns[::-1], answers.column("status")):
        is_ok = pc.is_in(status, value_set=pa.array([OK, TRUNCATED, SKIPPED]))
        failed = np.where(is_ok.to_numpy(zero_copy_only=False), failed, status.to_pylist())
    return [str(status) for status in failed]
