"""A policy: the rule of a filter with its thresholds, and why it drops a document.

Entry points: `Policy.of_spec`, `read_policy` for the thresholds that a filter stored, and `Judge`,
which applies a policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import StorageError
from pipeline.filters.expressions import Group, Score, conjuncts, probabilities_in
from pipeline.hashes import parse_versioned_json, validated
from pipeline.ledger.snapshots import SnapshotTask
from pipeline.sources.rule import Expression, Rule, fields_in
from pipeline.spec.filters import FilterSpec

FORMAT = 1
# The column of the input's columns, which are strings.
INPUT = "doc"
# Decimals of a threshold in the reason of a dropped document; the policy has all of them.
_DIGITS = 6

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Clause:
    """Drops the documents whose score is above the threshold of their group."""

    of: str
    by: str | None
    otherwise: float
    at: Mapping[str, float] = field(default_factory=dict)  # by group
    share: float = 0
    sizes: Mapping[str, int] = field(default_factory=dict)  # documents of each group, with a score
    small: tuple[str, ...] = ()  # groups that have the threshold of all documents

    def __post_init__(self) -> None:
        # — no score is above NaN, so it would keep everything
        if any(map(math.isnan, (self.otherwise, *self.at.values()))):
            raise ValueError("a threshold is NaN; write a number")

    @property
    def places(self) -> tuple[str, str]:
        """Where the user wrote `of` and `by`."""
        return "filter.drop_top.of", "filter.drop_top.by"


@dataclass(frozen=True, slots=True)
class Policy:
    """A rule with all of its numbers, as `policy.json` has it."""

    keep: str | None
    clauses: tuple[Clause, ...]
    tasks: Mapping[str, str] = field(default_factory=dict)  # fingerprints of the tasks it reads
    format: int = FORMAT

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns of the input that it reads."""
        read = (fields_in(text, INPUT, place=place) for text, place in self._texts())
        return tuple(dict.fromkeys(name for names in read for name in names))

    @property
    def probabilities(self) -> set[tuple[str, str]]:
        """The probabilities that it reads, by task and label."""
        read = (probabilities_in(text, place=place) for text, place in self._texts())
        return {name for names in read for name in names}

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Each expression, and where the user wrote it."""
        texts = [(self.keep, "filter.keep")]
        for clause in self.clauses:
            texts += zip((clause.of, clause.by), clause.places, strict=True)
        yield from ((text, place) for text, place in texts if text)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_spec(cls, spec: FilterSpec, tasks: Mapping[str, SnapshotTask]) -> Policy:
        """The policy of a spec. `decisions.with_thresholds` adds the thresholds of `drop_top`."""
        top = spec.drop_top
        if top is None:
            return cls(spec.keep, ())
        by = top.by and group_sql(top.by, tasks)
        return cls(spec.keep, (Clause(top.of, by, math.inf, share=top.share),))


def group_sql(by: str, tasks: Mapping[str, SnapshotTask]) -> str:
    """A group as SQL: the name of a task means its label, or its labels, which are no group."""
    if by not in tasks:
        return by
    return f"{by}.labels" if "labels" in tasks[by].columns else f"{by}.label"


def read_policy(data: bytes, path: str) -> Policy:
    """The policy that a filter stored; StorageError if the file is damaged."""
    try:
        return validated(Policy, parse_versioned_json(data, FORMAT))
    except ValueError as error:
        raise StorageError(f"{path}: is not a policy: {error}; delete it") from error


@dataclass(frozen=True, slots=True)
class Judgements:
    """What a policy does with some rows, and why."""

    causes: Sequence[Sequence[str]]  # [docs]: the conditions, clauses or status that drop it
    reasons: Sequence[str]  # [docs]: the causes in words, with thresholds; "" where it is kept
    # Of each clause:
    scores: Sequence[Floats]  # [docs]; NaN where there is none
    groups: Sequence[Sequence[str]]  # [docs]; "" without groups

    @property
    def dropped(self) -> Bools:  # [docs]
        return np.array([bool(causes) for causes in self.causes], np.bool_)


class Judge:
    """Applies a policy to rows that have these columns.

    Args:
        policy: With thresholds.
        schema: The rows' columns; `doc` is a struct of `Policy.inputs`.
    """

    def __init__(self, policy: Policy, schema: pa.Schema) -> None:
        self.policy = policy
        self._keep = _BoundKeep(policy.keep, schema) if policy.keep else None
        self.clauses = [BoundClause(clause, schema) for clause in policy.clauses]
        bound: list[Expression] = [self._keep.rule] if self._keep else []
        for clause in self.clauses:
            bound += clause.expressions
        self.columns = tuple(
            name for name in schema.names if any(name in expression.columns for expression in bound)
        )
        # — the columns with answers, each of which has a status
        self.tasks = tuple(
            name
            for name in self.columns
            if name != INPUT and pa.types.is_struct(schema.field(name).type)
        )

    def decide(self, rows: pa.RecordBatch, failed: Sequence[str], on_error: str) -> Judgements:
        """Which of these documents are dropped, and why.

        `on_error` alone decides about a document without an answer, whose status is in `failed`:
        only with `drop` it is dropped. A document for which `keep` is null is dropped, as with
        SQL's WHERE. The words of a clause have the threshold and the group; its cause has neither,
        because there may be many groups.
        """
        answered = np.array([not status for status in failed], np.bool_)
        causes = [
            [f"on_error: {status}"] if status and on_error == "drop" else [] for status in failed
        ]
        words = [list(reasons) for reasons in causes]
        for verdict, condition, mask in self._keep.broken(rows) if self._keep else ():
            for row in np.flatnonzero(mask & answered).tolist():
                # — of several conditions, the first one has the verdict
                words[row].append(condition if causes[row] else verdict + condition)
                causes[row].append(verdict + condition)
        scores, groups = [], []
        for bound in self.clauses:
            scores.append(bound.scores(rows))
            groups.append(bound.groups(rows))
            limits = bound.limits(groups[-1])
            name = f"drop_top: {bound.clause.of}"
            for row in np.flatnonzero((scores[-1] > limits) & answered).tolist():
                where = f" in {groups[-1][row]}" if groups[-1][row] else ""
                words[row].append(f"{name} > {limits[row]:.{_DIGITS}g}{where}")
                causes[row].append(f"{name} is above its threshold")
        return Judgements(causes, ["; ".join(reasons) for reasons in words], scores, groups)


class _BoundKeep:
    """`keep` with the conditions that it joins by AND, bound to the columns of some rows."""

    def __init__(self, keep: str, schema: pa.Schema) -> None:
        place = "filter.keep"
        self.rule = Rule(keep, schema, place=place)
        # — SQL also takes a number or a string for a condition
        self._conditions = {
            part: Rule(f"({part})::BOOLEAN", schema, place=place)
            for part in conjuncts(keep, place=place)
        }

    def broken(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Bools]]:
        """Where the whole is false or null: the verdict, a condition, and who breaks it."""
        whole = self.rule.verdicts(rows)
        for value, name in ((False, "false"), (None, "null")):
            where = _equals(whole, value)
            if not where.any():
                continue
            for condition, rule in self._conditions.items():
                only = len(self._conditions) == 1
                mask = where if only else where & _equals(rule.verdicts(rows), value)
                yield f"keep is {name}: ", condition, mask


def _equals(verdicts: pa.BooleanArray, value: bool | None) -> Bools:
    """Where a verdict is this value; None is null."""
    equal = pc.is_null(verdicts) if value is None else pc.fill_null(pc.invert(verdicts), False)
    return np.asarray(equal.to_numpy(zero_copy_only=False), np.bool_)


class BoundClause:
    """A clause, bound to the columns of some rows."""

    def __init__(self, clause: Clause, schema: pa.Schema) -> None:
        self.clause = clause
        of, by = clause.places
        self._score = Score(clause.of, schema, place=of)
        self._group = Group(clause.by, schema, place=by) if clause.by else None
        self.expressions = [self._score, *([self._group] if self._group else [])]

    def scores(self, rows: pa.RecordBatch) -> Floats:  # [rows]
        """The score of each row; NaN where there is none."""
        return self._score.scores(rows)

    def groups(self, rows: pa.RecordBatch) -> list[str]:  # [rows]
        """The group of each row; "" without groups."""
        return [""] * rows.num_rows if self._group is None else self._group.names(rows)

    def limits(self, groups: Sequence[str]) -> Floats:  # [rows]
        """The threshold of each row's group; a score above it is a cause to drop the row."""
        clause = self.clause
        return np.array([clause.at.get(group, clause.otherwise) for group in groups], np.float64)

    def kept(self, rows: pa.RecordBatch) -> list[bool]:  # [rows]
        """Whether each row stays: its score is at most the threshold of its group, or missing."""
        is_above = self.scores(rows) > self.limits(self.groups(rows))
        kept: list[bool] = np.logical_not(is_above).tolist()
        return kept
