"""The rule of a filter as an audit reads it: what it drops, why, and what it should drop.

Entry point: `AuditedRule`. Used by `audit_sample`, which draws texts, and `audit`, which estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.errors import Problem, SpecError, listed, option_error
from pipeline.filters.decisions import Thresholds, decided
from pipeline.filters.ideal_answers import Reason, Truth, condition, ideal_rows, reasons_of
from pipeline.filters.rule import failed_status
from pipeline.filters.snapshot_rule import SnapshotRule
from pipeline.gold.fitted_texts import fitted_texts
from pipeline.gold.sample_design import HASH
from pipeline.gold.values import UNLABELLED
from pipeline.options import AuditOptions
from pipeline.sources.shards import Shard
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec

Bools = NDArray[np.bool_]
Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int64]
SHOWN_LABELS = 12
_HEX = 16  # digits of a content hash that tell texts apart


@dataclass(frozen=True, slots=True)
class AnsweredDocuments:
    """The documents of a shard that have an answer."""

    rows: pa.RecordBatch  # as the rule reads them
    positions: Numbers  # [rows]: in the snapshot
    hashes: Hashes  # [rows]
    groups: Numbers  # [rows]: the number of a group
    dropped: Bools  # [rows]: by the whole rule


@dataclass(frozen=True, slots=True)
class AuditedRule:
    """A filter's rule, and what says which documents should be dropped."""

    rule: SnapshotRule  # with the groups of the estimates
    shards: Mapping[str, Shard]
    dropped: Sequence[Bools]  # [shards][docs]: by the whole rule; [] before the labels are read
    positive: str | None  # the task and label of documents that should be dropped, if it is named
    reasons: tuple[Reason, ...]  # for which the rule drops documents; with `positive`, none
    # A document should be dropped if one of these drops it with perfect answers.
    criteria: tuple[Reason, ...]

    @classmethod
    def of(cls, spec: JobSpec, options: AuditOptions) -> AuditedRule:
        """The rule, after every check that needs no work; SpecError if an option does not suit."""
        rule = SnapshotRule.of(spec, options.by)
        audited = cls._bound(rule, {}, [], options.positive, Thresholds(math.inf, {}))
        if not audited.tasks:
            fix = "reads no answer, so people have nothing to label; name a label of documents "
            fix += "that should be dropped: --positive TASK.LABEL"
            raise SpecError([Problem("filter", fix)])
        return audited

    def with_thresholds(self, cache_dir: Path) -> AuditedRule:
        """The same with all thresholds, after a check of the input."""
        rule = self.rule
        rule.warn_of_older_answers(cache_dir)
        shards, _ = rule.input_shards(cache_dir)
        with decided(rule.rule, rule.rows(shards), "keep") as table:
            dropped = [
                table.of_shard(number)["dropped"].to_numpy()
                for number in range(len(rule.contents.shards))
            ]
            return self._bound(rule, shards, dropped, self.positive, table.thresholds)

    @classmethod
    def _bound(
        cls,
        rule: SnapshotRule,
        shards: Mapping[str, Shard],
        dropped: Sequence[Bools],
        positive: str | None,
        thresholds: Thresholds | None,
    ) -> AuditedRule:
        names = rule.contents.tasks.keys()
        if positive is None:
            reasons = reasons_of(rule.rule, thresholds)
            return cls(rule, shards, dropped, None, reasons, reasons)
        task, label = _task_and_label(rule, positive)
        quoted = label.replace("'", "''")
        kinds = {each.name: each.kind for each in rule.spec.tasks}
        sql = f"\"{task}\".label <> '{quoted}'"
        if kinds[task] == "multi":
            sql = f"not list_contains(\"{task}\".labels, '{quoted}')"
        other = condition(sql, positive, rule.rule.schema, names)
        return cls(rule, shards, dropped, positive, (), (other,))

    @property
    def spec_tasks(self) -> dict[str, TaskSpec]:
        """The spec's tasks by name."""
        return {task.name: task for task in self.rule.spec.tasks}

    @property
    def tasks(self) -> dict[str, tuple[str, ...]]:
        """The tasks that people label, with their labels."""
        read = {task for criterion in self.criteria for task in criterion.tasks}
        return {task.name: tuple(task.labels) for task in self.rule.spec.tasks if task.name in read}

    @property
    def read_tasks(self) -> tuple[str, ...]:
        """The tasks that a document needs an answer to: those of the rule, and those to label."""
        names = {*self.rule.rule.tasks, *self.tasks}
        return tuple(task.name for task in self.rule.spec.tasks if task.name in names)

    def documents(self, groups: dict[str, int]) -> Iterator[AnsweredDocuments]:
        """The documents with an answer, shard by shard; `groups` gets the numbers of all groups.

        A document without a group has an answer all the same.
        """
        first, read = 0, self.read_tasks
        for batch, dropped in zip(self.rule.rows(self.shards), self.dropped, strict=True):
            answered = failed_status(batch, read).is_null().to_numpy(zero_copy_only=False)
            rows = batch.filter(pa.array(answered))
            hashes, names = rows.column(HASH).to_pylist(), self.rule.groups(rows).to_pylist()
            yield AnsweredDocuments(
                rows,
                first + np.flatnonzero(answered),
                np.array([text_number(text) for text in hashes], np.uint64),
                np.array([groups.setdefault(name, len(groups)) for name in names], np.int64),
                dropped[answered],
            )
            first += len(batch)

    def by_reason(self, rows: pa.RecordBatch) -> Bools:  # [rows, reasons]
        """Whether each reason drops each row."""
        drops = (reason.drops(rows) for reason in self.reasons)
        return np.array([*drops], np.bool_).reshape(len(self.reasons), len(rows)).T

    def by_labels(
        self,
        rows: pa.RecordBatch,
        labels: Mapping[str, Numbers],  # [rows] by part of a task: the label, or UNLABELLED
    ) -> tuple[Bools, Bools]:  # [rows, criteria] each
        """Whether the rows have the labels that each criterion reads, and whether it drops them."""
        known, should = np.ones((2, len(rows), len(self.criteria)), np.bool_)
        for number, criterion in enumerate(self.criteria):
            truth: dict[str, list[Truth]] = {}
            for name in criterion.tasks:
                task = self.spec_tasks[name]
                codes = np.array([labels[part.name] for part in task.parts])
                of_rows = (codes != UNLABELLED).all(axis=0)
                truth[name] = [
                    _truth(task, of_row) if is_known else None
                    for of_row, is_known in zip(codes.T.tolist(), of_rows, strict=True)
                ]
                known[:, number] &= of_rows
            should[:, number] = criterion.drops(ideal_rows(rows, truth, self.spec_tasks))
        return known, should

    def left_out(self, answered: Hashes, fitted: Hashes) -> dict[str, int]:
        """How many texts of the corpus are not evidence, by reason.

        Args:
            answered: The texts of all documents that have an answer.
            fitted: Those that answers were fitted to.
        """
        counts = {
            "without an answer": self.rule.contents.rows - len(answered),
            "answers were fitted to": len(np.intersect1d(answered, fitted)),
        }
        return {reason: count for reason, count in counts.items() if count}


def _truth(task: TaskSpec, codes: Sequence[int]) -> Truth:
    """The label with this number, or of kind `multi` the labels that are answered with yes."""
    labels = list(task.labels)
    if task.kind != "multi":
        return labels[codes[0]]
    return [label for label, code in zip(labels, codes, strict=True) if code == 0]


def _task_and_label(rule: SnapshotRule, positive: str) -> tuple[str, str]:
    """The task and the label that `positive` names."""
    pairs = {f"{t.name}.{label}": (t.name, label) for t in rule.spec.tasks for label in t.labels}
    if positive not in pairs:
        shown = listed(list(pairs)[:SHOWN_LABELS]) + ", ..." * (len(pairs) > SHOWN_LABELS)
        fix = f"the spec has no such task and label; write one of {shown}"
        raise option_error("positive", fix, positive)
    return pairs[positive]


def text_number(content_hash: str) -> int:
    """A content hash as a number."""
    return int(content_hash[:_HEX], 16)


def fitted_hashes(audited: AuditedRule) -> Hashes:
    """The texts that the answers of the rule's tasks were fitted to."""
    spec = audited.rule.spec
    parts = [part for task in spec.tasks if task.name in audited.read_tasks for part in task.parts]
    texts = {text for part in parts for text in fitted_texts(spec, part)}
    return np.array(sorted(map(text_number, texts)), np.uint64)
