"""The rule of a spec's filter, bound to the columns of some rows. Entry point: `FilterRule`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.filters.inputs import INPUT
from pipeline.ledger.snapshots import SnapshotTask
from pipeline.sources.documents import OK, SKIPPED, TRUNCATED
from pipeline.sources.rule import (
    Expression,
    Rule,
    fields_in,
    one_line,
    parsed,
    references,
    sql_of,
    whole,
)
from pipeline.spec.filters import FilterSpec

# The group of documents without a value.
NO_GROUP = "null"
KEEP, OF, BY = "filter.keep", "filter.drop_top.of", "filter.drop_top.by"


class Score(Expression):
    """An expression that is a number."""

    def scores(self, rows: pa.RecordBatch) -> pa.DoubleArray:  # [rows]
        """The number of each row; null where there is none, or NaN."""
        values = self.values(rows, "DOUBLE")
        return pc.if_else(pc.is_nan(values), None, values)

    def _check(self, kind: pa.DataType) -> None:
        is_number = pa.types.is_floating(kind) or pa.types.is_integer(kind)
        if not (is_number or pa.types.is_decimal(kind)):
            raise self._wrong(f"is {kind}, not a number; name a probability, such as task.p.label")


class Group(Expression):
    """An expression whose values, as texts, are the names of groups."""

    def names(self, rows: pa.RecordBatch) -> pa.StringArray:  # [rows]
        """The group of each row."""
        return pc.fill_null(self.values(rows, "VARCHAR"), NO_GROUP)

    def _check(self, kind: pa.DataType) -> None:
        if pa.types.is_nested(kind):
            raise self._wrong(
                "has several values; name one, such as toxic.label, or a condition, such as "
                "list_contains(topic.labels, 'law')"
            )


@dataclass(frozen=True, slots=True)
class FilterRule:
    """A rule, bound to the columns of some rows."""

    filter: FilterSpec
    conditions: Mapping[str, Rule]  # that `keep` joins with AND, by their SQL; all must be true
    score: Score | None  # of `drop_top`
    group: Group | None  # of `drop_top`
    schema: pa.Schema
    tasks: tuple[str, ...]  # that it reads

    @classmethod
    def of(cls, spec: FilterSpec, tasks: Collection[str], schema: pa.Schema) -> FilterRule:
        """The rule, bound to rows of this schema; SpecError if it does not suit them.

        Args:
            spec: As of `in_sql`.
            tasks: The columns with answers.
            schema: Of the rows; `doc` is a struct of the columns of `inputs_of`.
        """
        bound: list[Expression] = []
        conditions: dict[str, Rule] = {}
        if spec.keep:
            bound.append(Rule(spec.keep, schema, place=KEEP))
            for part in conjuncts(spec.keep, place=KEEP):
                # — SQL also takes a number or a string for a condition
                conditions[part] = Rule(f"({part})::BOOLEAN", schema, place=KEEP)
        top = spec.drop_top
        score = Score(top.of, schema, place=OF) if top else None
        group = Group(top.by, schema, place=BY) if top and top.by else None
        bound += [expression for expression in (score, group) if expression]
        read = {column for expression in bound for column in expression.columns}
        own = tuple(name for name in tasks if name in read)
        return cls(spec, conditions, score, group, schema, own)

    @property
    def probabilities(self) -> set[tuple[str, str]]:
        """The probabilities that it reads, by task and label."""
        read = (probabilities_in(text, place=place) for text, place in _texts(self.filter))
        return {name for names in read for name in names}

    def asked(self, rows: pa.RecordBatch) -> pa.BooleanArray:  # [rows]
        """Whether each question that the rule reads was asked."""
        asked = pa.array([True] * rows.num_rows, pa.bool_())
        for task in self.tasks:
            status = pc.struct_field(rows.column(task), "status")
            asked = pc.and_(asked, pc.not_equal(status, SKIPPED))
        return asked


def in_sql(spec: FilterSpec, tasks: Mapping[str, SnapshotTask]) -> FilterSpec:
    """The rule with each expression on one line, and groups as SQL; SpecError as of `Rule`."""
    keep, top = spec.keep, spec.drop_top
    if keep is not None:
        keep = one_line(keep, place=KEEP)
    if top is not None:
        by = one_line(group_sql(top.by, tasks), place=BY) if top.by else None
        top = top.model_copy(update={"of": one_line(top.of, place=OF), "by": by})
    return spec.model_copy(update={"keep": keep, "drop_top": top})


def group_sql(by: str, tasks: Mapping[str, SnapshotTask]) -> str:
    """A group as SQL: the name of a task means its label, or its labels, which are no group."""
    if by not in tasks:
        return by
    return f"{by}.labels" if "labels" in tasks[by].columns else f"{by}.label"


def inputs_of(spec: FilterSpec) -> tuple[str, ...]:
    """The columns of the input that a rule reads; SpecError as of `Rule`."""
    read = (fields_in(text, INPUT, place=place) for text, place in _texts(spec))
    return tuple(dict.fromkeys(name for names in read for name in names))


def _texts(spec: FilterSpec) -> Iterator[tuple[str, str]]:
    """Each expression of a rule, and where the user wrote it."""
    top = spec.drop_top
    texts = [(spec.keep, KEEP), *([(top.of, OF), (top.by, BY)] if top else [])]
    yield from ((text, place) for text, place in texts if text)


def failed_status(rows: pa.RecordBatch, tasks: Collection[str]) -> pa.StringArray:  # [rows]
    """The first failed status of each document, of reading or of one of the tasks; else null.

    A question that was not asked because of its condition did not fail: its answer is null.
    """
    statuses = (pc.struct_field(rows.column(name), "status") for name in tasks)
    answered = pa.array([OK, TRUNCATED, SKIPPED])
    return pc.coalesce(
        *(
            pc.if_else(pc.is_in(status, value_set=answered), None, status)
            for status in (rows.column("status"), *statuses)
        )
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
