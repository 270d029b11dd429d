"""A policy: the rule of a filter with its thresholds, and why it drops a document.

Entry points: `Policy.of_spec`, `read_policy` for the policy of another filter, and `Judge`, which
applies one. A threshold of
`drop_top` is the largest score that stays when a share of a group goes: of n scores, those above
number n - floor(n * share). So it is DuckDB's `quantile_disc(score, 1 - share)`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from pipeline.errors import Problem, SpecError
from pipeline.hashes import parse_json
from pipeline.ledger.snapshots import Contents
from pipeline.sources.rule import Expression, Group, Rule, Score, conjuncts, fields_in
from pipeline.spec.filters import DropTopSpec, FilterSpec, ThresholdsSpec

FORMAT = 1
# A clause that drops nothing: the score and the groups of an audit.
AUDIT = "audit"
# The column of the input's columns, which are strings.
INPUT = "doc"
# Decimals of a threshold in the reason of a dropped document; the policy has all of them.
_DIGITS = 6

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Clause:
    """Drops the documents whose score is above the threshold of their group."""

    kind: str  # drop_top | thresholds
    of: str
    by: str | None
    otherwise: float
    at: Mapping[str, float] = field(default_factory=dict)  # by group
    share: float | None = None  # of drop_top
    sizes: Mapping[str, int] = field(default_factory=dict)  # documents of each group, with a score
    small: tuple[str, ...] = ()  # groups that have the threshold of all documents

    @property
    def places(self) -> tuple[str, str]:
        """Where the user wrote `of` and `by`."""
        if self.kind == AUDIT:
            return "--positive", "--by"
        return f"filter.{self.kind}.of", f"filter.{self.kind}.by"


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
        texts = [(self.keep, "filter.keep")]
        for clause in self.clauses:
            texts += zip((clause.of, clause.by), clause.places, strict=True)
        read = (fields_in(text, INPUT, place=place) for text, place in texts if text)
        return tuple(dict.fromkeys(name for names in read for name in names))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_spec(cls, spec: FilterSpec, tasks: Collection[str]) -> Policy:
        """The policy of a spec, whose `drop_top` has no thresholds yet (`with_thresholds`).

        A group that is the name of a task is the task's label.
        """
        clauses = []
        for kind, own in (("drop_top", spec.drop_top), ("thresholds", spec.thresholds)):
            if own is None:
                continue
            by = f"{own.by}.label" if own.by in tasks else own.by
            if isinstance(own, ThresholdsSpec):
                clauses.append(Clause(kind, own.of, by, own.otherwise, dict(own.at)))
            elif isinstance(own, DropTopSpec):
                clauses.append(Clause(kind, own.of, by, math.inf, share=own.share))
        return cls(spec.keep, tuple(clauses))


_POLICY = TypeAdapter(Policy)  # of JSON


def read_policy(data: bytes, path: str, contents: Contents) -> Policy:
    """The policy in a file; SpecError unless its tasks are those of the snapshot."""
    try:
        content = parse_json(data)
        policy = _POLICY.validate_python(content)
        if policy.format != FORMAT:
            raise ValueError(f"has format {policy.format}, and this version reads {FORMAT}")
    except (ValueError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        fix = f"is no policy: {reason}; name a policy.json that a filter wrote"
        raise SpecError([Problem("filter.policy", fix, path)]) from error
    for task, fp in policy.tasks.items():
        now = contents.tasks.get(task)
        if now is None or now.fp != fp:
            what = "no such task" if now is None else f"the version {now.fp}"
            fix = (
                f"its thresholds are of the version {fp} of the task {task!r}, and the snapshot "
                f"has {what}; label with the same spec, or choose thresholds again"
            )
            raise SpecError([Problem("filter.policy", fix, path)])
    return policy


@dataclass(frozen=True, slots=True)
class Decision:
    """Which documents of some rows a policy drops, and why."""

    dropped: Bools  # [docs]
    causes: Mapping[str, Bools]  # [docs] of each condition, clause or status that drops one of them
    reasons: Sequence[str]  # [docs]: the causes in words, with thresholds; "" where it is kept

    @property
    def counts(self) -> Counter[str]:
        """The dropped documents by cause; a document with several causes counts for each."""
        return Counter({cause: int(mask.sum()) for cause, mask in self.causes.items()})

    @property
    def several(self) -> int:
        """The documents that more than one cause drops."""
        causes = np.zeros(len(self.dropped), np.int64)
        for mask in self.causes.values():
            causes += mask
        return int((causes > 1).sum())


@dataclass(slots=True)
class CauseCounts:
    """Why documents are dropped, and how many have no answer: sums of decisions."""

    reasons: Counter[str] = field(default_factory=Counter)  # dropped documents by cause
    several: int = 0  # documents with more than one cause: they are in `reasons` more than once
    failed: Counter[str] = field(default_factory=Counter)  # documents without an answer, by status

    def add(self, decision: Decision, failed: Sequence[str]) -> None:
        """Adds rows, whose failed statuses are in `failed`."""
        self.reasons.update(decision.counts)
        self.several += decision.several
        self.failed.update(filter(None, failed))


class Judge:
    """Applies a policy to rows that have these columns.

    Args:
        policy: With thresholds.
        schema: The rows' columns; `doc` is a struct of `Policy.inputs`.
    """

    def __init__(self, policy: Policy, schema: pa.Schema) -> None:
        self.policy, self.inputs = policy, policy.inputs
        self._keep = _BoundKeep(policy.keep, schema) if policy.keep else None
        self.clauses = [BoundClause(clause, schema) for clause in policy.clauses]
        bound: list[Expression] = [self._keep.rule] if self._keep else []
        for clause in self.clauses:
            bound += clause.expressions
        self.columns = tuple(
            name for name in schema.names if any(name in each.columns for each in bound)
        )
        # — the columns with answers, each of which has a status
        self.tasks = tuple(
            name
            for name in self.columns
            if name != INPUT and pa.types.is_struct(schema.field(name).type)
        )

    def decide(self, rows: pa.RecordBatch, failed: Sequence[str], on_error: str) -> Decision:
        """Which of these documents are dropped, and why.

        `on_error` alone decides about a document without an answer, whose status is in `failed`:
        only with `drop` it is dropped. A document for which `keep` is null is dropped, as with
        SQL's WHERE.
        """
        answered = np.array([not status for status in failed], np.bool_)
        dropped = np.zeros(rows.num_rows, np.bool_)
        causes: dict[str, Bools] = {}
        reasons = [""] * rows.num_rows
        broken = [self._keep.broken(rows)] if self._keep else []
        for parts in (*broken, *(clause.broken(rows) for clause in self.clauses)):
            for part in parts:
                if not (mask := part.mask & answered).any():
                    continue
                causes[part.cause] = mask
                dropped |= mask
                for row in np.flatnonzero(mask).tolist():
                    before = reasons[row]
                    words = part.words[row] if part.words else part.cause
                    # — of several conditions of `keep`, the first one has the verdict
                    words = words.removeprefix(part.verdict) if before else words
                    reasons[row] = f"{before}; {words}" if before else words
        for status in sorted(set(failed) - {""}) if on_error == "drop" else ():
            mask = np.array([each == status for each in failed], np.bool_)
            cause = f"on_error: {status}"
            causes[cause] = mask
            dropped |= mask
            for row in np.flatnonzero(mask).tolist():
                reasons[row] = cause
        return Decision(dropped, causes, reasons)

    def reasons(self, rows: pa.RecordBatch, failed: Sequence[str], on_error: str) -> Sequence[str]:
        """For each document why it is dropped; "" where it is kept. As of `decide`."""
        return self.decide(rows, failed, on_error).reasons


@dataclass(frozen=True, slots=True)
class _Broken:
    """A condition or a clause that some documents break."""

    cause: str
    mask: Bools  # [docs]
    verdict: str = ""  # the beginning of the cause
    words: Mapping[int, str] = field(default_factory=dict)  # by document; default: the cause


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

    def broken(self, rows: pa.RecordBatch) -> Iterator[_Broken]:
        """The conditions that a document breaks, where the whole is false or null."""
        whole = self.rule.verdicts(rows)
        for value, name in ((False, "false"), (None, "null")):
            verdict = f"keep is {name}: "
            where = _equals(whole, value)
            if not where.any():
                continue
            for condition, rule in self._conditions.items():
                only = len(self._conditions) == 1
                mask = where if only else where & _equals(rule.verdicts(rows), value)
                yield _Broken(verdict + condition, mask, verdict)


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
        self.expressions = [each for each in (self._score, self._group) if each is not None]

    def scores(self, rows: pa.RecordBatch) -> Floats:  # [rows]
        """The score of each row; NaN where there is none."""
        return self._score.scores(rows)

    def groups(self, rows: pa.RecordBatch) -> list[str]:  # [rows]
        """The group of each row; "" without groups."""
        return [""] * rows.num_rows if self._group is None else self._group.names(rows)

    def codes(self, rows: pa.RecordBatch, numbers: dict[str, int]) -> NDArray[np.int32]:  # [rows]
        """The number of each row's group, in the order in which groups occur first."""
        named = (numbers.setdefault(name, len(numbers)) for name in self.groups(rows))
        return np.fromiter(named, np.int32, rows.num_rows)

    def broken(self, rows: pa.RecordBatch) -> Iterator[_Broken]:
        """The rows whose score is above the threshold of their group; without a score, it is not.

        Their words have the threshold and the group; the cause has neither, because there may be
        many groups.
        """
        clause, groups = self.clause, self.groups(rows)
        limits = np.array([clause.at.get(group, clause.otherwise) for group in groups], np.float64)
        mask = self.scores(rows) > limits
        words = {}
        for row in np.flatnonzero(mask).tolist():
            where = f" in {groups[row]}" if groups[row] else ""
            words[row] = f"{clause.kind}: {clause.of} > {limits[row]:.{_DIGITS}g}{where}"
        yield _Broken(f"{clause.kind}: {clause.of} is above its threshold", mask, words=words)


def with_thresholds(
    judge: Judge,
    top: DropTopSpec | None,
    rows: Iterable[tuple[pa.RecordBatch, Sequence[str]]],
    tasks: Mapping[str, str],
) -> Policy:
    """The policy with the thresholds of `drop_top`, exact over all rows.

    Args:
        judge: Of what `Policy.of_spec` returned.
        top: `drop_top` of the spec.
        rows: The rows with the failed status of each; those that failed have no score. Each is held
            as 12 bytes.
        tasks: The fingerprints of all tasks.

    Raises:
        SpecError: A row that did not fail has no score, or no row has one.
    """
    policy = judge.policy
    read = {name: tasks[name] for name in judge.columns if name in tasks}
    if top is None:
        return replace(policy, tasks=read)
    [bound] = [each for each in judge.clauses if each.clause.kind == "drop_top"]
    numbers: dict[str, int] = {}
    scores, groups = [np.empty(0)], [np.empty(0, np.int32)]
    for batch, failed in rows:
        answered = np.array([not status for status in failed], np.bool_)
        of_batch = bound.scores(batch)
        if (missing := np.flatnonzero(answered & ~np.isfinite(of_batch))).size:
            doc_id = batch.column("doc_id")[int(missing[0])].as_py()
            fix = f"is no finite number for document {doc_id!r}, which has an answer"
            fix += "; write coalesce(..., 0)"
            raise SpecError([Problem("filter.drop_top.of", fix, top.of)])
        scores.append(of_batch[answered])
        groups.append(bound.codes(batch, numbers)[answered])
    whole, codes = np.concatenate(scores), np.concatenate(groups)
    if not whole.size:
        fix = "no document has a score, so there is no threshold; label first"
        raise SpecError([Problem("filter.drop_top.of", fix, top.of)])
    otherwise = threshold(whole, top.share)
    order = np.argsort(codes, kind="stable")
    sizes = np.bincount(codes, minlength=len(numbers))
    parts = dict(zip(numbers, np.split(whole[order], np.cumsum(sizes)[:-1]), strict=True))
    parts = {name: own for name, own in parts.items() if own.size} if top.by else {}
    small = tuple(sorted(name for name, own in parts.items() if own.size < top.smallest))
    at = {n: threshold(own, top.share) for n, own in sorted(parts.items()) if n not in small}
    counted = {name: len(own) for name, own in sorted(parts.items())}
    done = replace(bound.clause, otherwise=otherwise, at=at, sizes=counted, small=small)
    clauses = tuple(done if each is bound.clause else each for each in policy.clauses)
    return replace(policy, clauses=clauses, tasks=read)


def threshold(scores: Floats, share: float) -> float:
    """The largest score that stays when at most this share goes, those with the highest scores."""
    dropped = math.floor(Fraction(str(share)) * len(scores))
    place = len(scores) - dropped - 1
    return float(np.partition(scores, place)[place])
