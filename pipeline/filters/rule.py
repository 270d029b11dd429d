"""The rule of a spec's filter, bound to the columns of some rows.

Entry points: `SnapshotRule` for the last snapshot, `FilterRule` for other rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import pyarrow as pa

from pipeline.errors import Option, Problem, SpecError
from pipeline.filters.labelled import LabelledRows
from pipeline.filters.side_table import JOINED, SideTable
from pipeline.ledger.rows import INPUT
from pipeline.ledger.snapshots import SnapshotTask
from pipeline.sources.rule import (
    Expression,
    Rule,
    fields_in,
    named,
    one_line,
    parsed,
    quoted,
    references,
    sql_of,
    whole,
)
from pipeline.spec.filters import FilterSpec
from pipeline.spec.schema import JobSpec

# The group of documents without a value.
NO_GROUP = "null"
ALL = "all"  # the group of a document without groups
KEEP, OF, BY = "filter.keep", "filter.drop_top.of", "filter.drop_top.by"


class Score(Expression):
    """An expression on one line that is a number."""

    @property
    def number(self) -> str:
        """SQL of the number of a row; null where there is none, or NaN."""
        return f"nullif(TRY(({self.text})::DOUBLE), 'NaN')"

    def _check(self, kind: pa.DataType) -> None:
        is_number = pa.types.is_floating(kind) or pa.types.is_integer(kind)
        if not (is_number or pa.types.is_decimal(kind)):
            raise self._wrong(f"is {kind}, not a number; name a probability, such as task.p.label")


class Group(Expression):
    """An expression on one line whose values, as texts, are the names of groups."""

    @property
    def group(self) -> str:
        """SQL of the group of a row."""
        return f"coalesce(TRY(({self.text})::VARCHAR), {quoted(NO_GROUP)})"

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
    side: SideTable | None = None  # whose columns it reads

    @classmethod
    def of(
        cls,
        spec: FilterSpec,
        tasks: Collection[str],
        schema: pa.Schema,
        side: SideTable | None = None,
    ) -> FilterRule:
        """The rule (as of `in_sql`), bound to rows of this schema, in which tasks are columns.

        `side` is the table of `join`. SpecError if the rule does not suit the rows.
        """
        rows, schema = schema, with_side(schema, side)
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
        return cls(spec, conditions, score, group, rows, own, side)

    @property
    def probabilities(self) -> set[tuple[str, str]]:
        """The probabilities that it reads, by task and label."""
        read = (probabilities_in(text, place=place) for text, place in _texts(self.filter))
        return {name for names in read for name in names}


@dataclass(frozen=True, slots=True)
class SnapshotRule:
    """The rule of a spec's filter, bound to the rows of its last snapshot."""

    labelled: LabelledRows
    rule: FilterRule
    by: tuple[Group, ...]  # what is counted by group, which decides nothing

    @classmethod
    def of(cls, spec: JobSpec, by: Sequence[str] = (), columns: Sequence[str] = ()) -> SnapshotRule:
        """The rule, after every check that reads no documents.

        `by` are groups to count: labels of tasks, or SQL; by default those of the rule. The rows
        also have these columns of the input.
        """
        if spec.filter is None:
            fix = "missing; write keep: and a condition, such as toxic.p.toxic < 0.5"
            raise SpecError([Problem("filter", fix)])
        tasks = (labelled := LabelledRows.of(spec)).contents.tasks
        filter, place = in_sql(spec.filter, tasks), Option("by")
        own = [filter.drop_top.by] if filter.drop_top else []
        groups = [one_line(group_sql(sql, tasks), place=place) for sql in by or own if sql]
        of_rule, of_groups = [*_texts(filter)], [(sql, place) for sql in groups]
        inputs: dict[str, str] = dict.fromkeys(columns, Option("columns"))
        inputs |= dict.fromkeys(_fields(INPUT, of_groups), place)
        inputs |= dict.fromkeys(_fields(INPUT, of_rule), "filter")
        labelled = replace(labelled, inputs=inputs)
        side, joined = None, _fields(JOINED, [*of_rule, *of_groups])
        if filter.join is not None and joined:
            side = SideTable.of(filter.join, spec.input.storage_options, joined)
        rule = FilterRule.of(filter, tasks, labelled.schema, side)
        schema = with_side(labelled.schema, side)
        return cls(labelled, rule, tuple(Group(sql, schema, place=place) for sql in groups))


def with_side(schema: pa.Schema, side: SideTable | None) -> pa.Schema:
    """The columns of rows beside the side table."""
    return schema if side is None else schema.append(side.field)


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
    names = [by, "labels" if "labels" in tasks[by].columns else "label"]
    plain = ".".join(names)
    with suppress(SpecError):
        if references(parsed(plain, BY)) == [names]:
            return plain
    return named(*names)  # — a word of SQL, such as `order`


def _fields(column: str, texts: Iterable[tuple[str, str]]) -> list[str]:
    """The fields of a column that expressions with their places name; SpecError as of `Rule`."""
    named = (fields_in(text, column, place=place) for text, place in texts)
    return list(dict.fromkeys(name for names in named for name in names))


def _texts(spec: FilterSpec) -> Iterator[tuple[str, str]]:
    """Each expression of a rule, and where the user wrote it."""
    top = spec.drop_top
    texts = [(spec.keep, KEEP), *([(top.of, OF), (top.by, BY)] if top else [])]
    yield from ((text, place) for text, place in texts if text)


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
