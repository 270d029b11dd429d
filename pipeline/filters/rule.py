"""The rule of a spec's filter on its last snapshot. Entry point: `SnapshotRule`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipeline.errors import Problem, SpecError
from pipeline.filters.inputs import doc_field, with_inputs
from pipeline.filters.labelled import current_labels
from pipeline.filters.policy import Judge, Policy, read_policy, with_thresholds
from pipeline.filters.shard import failed_status
from pipeline.ledger.rows import aligned_batches, wide_schema
from pipeline.ledger.snapshots import Contents
from pipeline.runtime.fitted_files import options_for, read_fitted
from pipeline.sources.shards import Shard
from pipeline.spec.filters import FilterSpec
from pipeline.spec.schema import JobSpec
from pipeline.stores.store import Store, open_store


@dataclass(frozen=True, slots=True)
class SnapshotRule:
    """A snapshot, and the rule that is applied to its rows."""

    spec: JobSpec
    filter: FilterSpec
    store: Store
    contents: Contents
    schema: pa.Schema  # of `open_labels`, with all tasks
    policy: Policy  # thresholds of shares are missing

    @classmethod
    def of(cls, spec: JobSpec) -> SnapshotRule:
        """The rule, after every check that needs no work."""
        if spec.filter is None:
            fix = "missing; write keep: and a condition, such as toxic.p.toxic < 0.5"
            raise SpecError([Problem("filter", fix)])
        store = open_store(spec.output, spec.storage_options)
        contents = current_labels(spec, store)
        if (source := spec.filter.policy) is None:
            policy = Policy.of_spec(spec.filter, contents.tasks)
        else:
            options = options_for(source, spec)
            data = read_fitted(source, options, place="filter.policy", made_by="assay filter")
            policy = read_policy(data, source, contents)
        rule = cls(
            spec, spec.filter, store, contents, wide_schema(contents, list(contents.tasks)), policy
        )
        rule.judge(policy)
        return rule

    def judge(self, policy: Policy) -> Judge:
        """The policy, bound to the rows of this snapshot; SpecError if it does not suit them."""
        inputs = policy.inputs
        return Judge(policy, self.schema.append(doc_field(inputs)) if inputs else self.schema)

    def answers(self) -> Iterator[pa.RecordBatch]:
        """The rows of each shard, without columns of the input."""
        return aligned_batches(self.store, self.contents, self.schema)

    def rows(self, shards: Mapping[str, Shard]) -> Iterator[tuple[pa.RecordBatch, Sequence[str]]]:
        """The rows of each shard as the policy reads them, with their failed status."""
        options, judge = self.spec.input.storage_options, self.judge(self.policy)
        for named, answers in zip(self.contents.shards, self.answers(), strict=True):
            rows = with_inputs(answers, shards[named.sid], options, judge.inputs)
            yield rows, failed_status(answers, judge.columns)

    def with_thresholds(self, shards: Mapping[str, Shard]) -> Policy:
        """The policy with all of its numbers."""
        if self.filter.policy is not None:
            return self.policy
        judge = self.judge(self.policy)
        versions = {name: task.fp for name, task in self.contents.tasks.items()}
        return with_thresholds(judge, self.filter.drop_top, self.rows(shards), versions)
