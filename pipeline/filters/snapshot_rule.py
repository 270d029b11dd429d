"""The rule of a spec's filter on its last snapshot. Entry point: `SnapshotRule`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import Option, Problem, SpecError
from pipeline.filters.inputs import INPUT, check_columns_of, doc_field, with_inputs
from pipeline.filters.labelled import current_labels, labelled_shards, warn_of_older_answers
from pipeline.filters.rule import FilterRule, Group, group_sql, in_sql, inputs_of
from pipeline.ledger.rows import aligned_batches, asked_rows, read_shard, wide_schema
from pipeline.ledger.snapshot_files import NamedShard
from pipeline.ledger.snapshots import Contents
from pipeline.sources.rule import fields_in
from pipeline.sources.shards import Shard
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, open_store

ALL = "all"  # the group of a document without groups


@dataclass(frozen=True, slots=True)
class SnapshotRule:
    """A snapshot, and the rule that is applied to its rows."""

    spec: JobSpec
    store: Store
    contents: Contents
    rule: FilterRule
    by: tuple[Group, ...]  # what is counted by group, which decides nothing
    inputs: tuple[str, ...]  # the columns of the input that the rule and the groups read

    @classmethod
    def of(cls, spec: JobSpec, by: Sequence[str] = ()) -> SnapshotRule:
        """The rule, after every check that needs no work.

        Args:
            spec: With a filter.
            by: Groups to count: labels of tasks, or SQL (default: the groups of the rule).
        """
        if spec.filter is None:
            fix = "missing; write keep: and a condition, such as toxic.p.toxic < 0.5"
            raise SpecError([Problem("filter", fix)])
        store = open_store(spec.output, spec.storage_options)
        contents = current_labels(spec, store)
        tasks = contents.tasks
        filter = in_sql(spec.filter, tasks)
        own = [filter.drop_top.by] if filter.drop_top else []
        groups = [group_sql(sql, tasks) for sql in by or own if sql]
        read = [fields_in(sql, INPUT, place=Option("by")) for sql in groups]
        named = (inputs_of(filter), *read)
        inputs = tuple(dict.fromkeys(name for names in named for name in names))
        doc = [doc_field(inputs)] if inputs else []
        schema = pa.schema([*wide_schema(contents, list(tasks)), *doc])
        rule = FilterRule.of(filter, tasks, schema)
        bound = tuple(Group(sql, schema, place=Option("by")) for sql in groups)
        return cls(spec, store, contents, rule, bound, inputs)

    def groups(self, rows: pa.RecordBatch) -> pa.StringArray:  # [rows]
        """The group of each row; without groups, the same for all."""
        if not self.by:
            return pa.array([ALL] * rows.num_rows, pa.string())
        names = (group.names(rows) for group in self.by)
        return pc.binary_join_element_wise(*names, ", ")

    def warn_of_older_answers(self, cache_dir: Path) -> None:
        """Logs a line for each task whose answers are of another wording or model than now."""
        warn_of_older_answers(self.spec, self.store, self.contents, cache_dir)

    def input_shards(self, cache_dir: Path) -> tuple[dict[str, Shard], int]:
        """The snapshot's shards in the input by id, and the number of files it does not know.

        Raises:
            SpecError: The input does not have the columns that the rule or the groups read.
            StorageError: The input changed since it was labelled.
        """
        shards, new_files = labelled_shards(self.spec, self.store, self.contents, cache_dir)
        read = [shards[named.sid] for named in self.contents.shards]
        options = self.spec.input.storage_options
        own = inputs_of(self.rule.filter)
        check_columns_of(read, options, own, place="filter")
        others = tuple(name for name in self.inputs if name not in own)
        check_columns_of(read, options, others, place=Option("by"))
        return shards, new_files

    def answers(self) -> Iterator[pa.RecordBatch]:
        """The rows of each shard, without columns of the input."""
        schema = wide_schema(self.contents, list(self.contents.tasks))
        batches = aligned_batches(self.store, self.contents, schema)
        return (asked_rows(self.contents, batch) for batch in batches)

    def answers_of(self, shard: NamedShard) -> pa.RecordBatch:
        """The rows of one shard, without columns of the input."""
        tasks = list(self.contents.tasks)
        schema = wide_schema(self.contents, tasks)
        return asked_rows(self.contents, read_shard(self.store, shard, schema=schema, tasks=tasks))

    def rows(self, shards: Mapping[str, Shard]) -> Iterator[pa.RecordBatch]:
        """The rows of each shard, as the rule and the groups read them."""
        options = self.spec.input.storage_options
        for named, answers in zip(self.contents.shards, self.answers(), strict=True):
            yield with_inputs(answers, shards[named.sid], options, self.inputs)
