"""The conditions of tasks and of a run: what they may name, and which documents they accept.

Entry points: `limit_of` and `inside` for the condition of a run, `tasks_named` and `accepted_by`
for those of tasks, `check` for both, and `input_columns` for the columns of the input that they
name. Must import neither torch nor Ray.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import chain, islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import Option, Problem, SpecError, UnreadableError, option_error
from pipeline.hashes import parse_json
from pipeline.ledger.columns import STAGE, Bools, answer_columns, answers_type, cast_rows
from pipeline.ledger.text_index import leading_bits
from pipeline.sources.documents import TooLong
from pipeline.sources.id_text import id_text
from pipeline.sources.records import SAMPLE_ROWS
from pipeline.sources.rule import Rule, fields_in, names_in, one_line
from pipeline.sources.shards import Shard
from pipeline.sources.source import check_unchanged, read_rows
from pipeline.sources.streams import Options, reading
from pipeline.sources.tables import TABLES, opened_table
from pipeline.spec.schema import JobSpec
from pipeline.spec.tasks import TaskSpec

DOC = "doc"  # the struct with the columns of the input
WHERE = Option("where")
DRAW = "__draw"  # no column of an input that a condition can name
_COLUMNS = {"doc_id": pa.string(), "n_chars": pa.int64(), "sample": pa.float64()}


def limit_of(sample: str | None, where: str | None) -> str | None:
    """The condition of a run with these values of --sample and --where; None without either.

    SpecError if the sample is no share, or the condition is empty.

    Examples:
        >>> limit_of("0.50%", "year > 2000")
        'sample < 0.005 AND (year > 2000)'
    """
    if where is not None and (not where.strip() or DRAW in where):
        fix = "write a condition on the input's columns, such as \"date >= '2026-11-01'\""
        raise option_error("where", fix, where)
    condition = None if where is None else one_line(where.strip(), place=WHERE)
    if sample is None:
        return condition
    share = f"sample < {_share(sample)}"
    return share if condition is None else f"{share} AND ({condition})"


def _share(text: str) -> str:
    """`1%` or `0.01` as the shortest decimal fraction; SpecError unless it is between 0 and 1."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(\s*%)?", text.strip(), re.ASCII)
    share = Decimal(match[1]) / (100 if match[2] else 1) if match else Decimal(0)
    if not 0 < share < 1:
        fix = "write a share above 0 and below 1, such as 1% or 0.01; leave it out to label all"
        raise option_error("sample", fix, text)
    return format(share.normalize(), "f")


def check(
    sql: str,
    shards: Sequence[Shard],
    options: Options,
    *,
    place: str,
    before: Sequence[TaskSpec] | None = None,
) -> None:
    """SpecError unless a condition can be evaluated on the first rows of the input.

    At least one of the first rows must have each column of the input that it names, and it must be
    computable on at least one of them. `before` are the tasks whose answers it may name; None for
    the condition of a run, which names columns of the input also without `doc.`.
    """
    names = _input_names(sql) if before is None else list(fields_in(sql, DOC, place=place))
    parts = _first_values(shards if names else (), names, options)
    whole = [part for part in parts if part.num_columns == len(names)]
    if parts and not whole:
        lacking = next(name for name in names if name not in parts[0].column_names)
        fix = f"{shards[0].path} has no column {lacking}; name a column of the input"
        raise SpecError([Problem(place, fix, sql)])
    view = parse_json(shards[0].version.view or "{}") if parts else {}
    if free := [name for name in names if name not in view.get("columns", names)]:
        fix = f"reads column {free[0]} of a Lance dataset without a version, in which it may "
        fix += "change while shards stay the same; name a version: lance+PATH@VERSION"
        raise SpecError([Problem(place, fix, sql)])
    rows = sum(part.num_rows for part in whole)
    for name in whole[0].column_names if rows else ():
        if all(part.column(name).null_count == part.num_rows for part in whole):
            fix = f"the first {rows} rows of {shards[0].path} have no value in {name}"
            raise SpecError([Problem(place, f"{fix}; name a column of the input", sql)])
    if names and not parts:
        return  # the input is empty
    others = _COLUMNS | ({DRAW: pa.float64()} if before is None else _types(before))
    scopes = [
        _of_input(part, part.num_rows, bare=before is None)
        | {name: pa.nulls(part.num_rows, kind) for name, kind in others.items()}
        for part in whole or [pa.table({})]
    ]
    met = [_accepted(sql, scope, place=place) for scope in scopes]
    if all(failed == len(chosen) for chosen, failed in met):
        first = pa.record_batch(list(scopes[0].values()), names=list(scopes[0]))
        Rule(sql, first.schema, place=place).check_on(first)


def inside(
    shard: Shard, limit: str | None, documents: pa.Table, options: Options
) -> tuple[Bools, int]:
    """[docs]: which documents of a shard the condition of a run accepts; on how many it fails.

    `documents` has the columns of a documents file. A document that cannot be read has the hash of
    the empty text, and no value in the columns of the input. None accepts all documents.
    """
    if limit is None:
        return np.ones(shard.rows, np.bool_), 0
    names = _input_names(limit)
    values = input_columns(shard, names, options) if names else None
    columns = _of_input(values, shard.rows, bare=True) | _of_documents(documents)
    if DRAW in limit:
        columns[DRAW] = pa.array(draws(shard.id, shard.rows))
    return _accepted(limit, columns, place=WHERE)


def drawn_below(share: float) -> str:
    """The condition of a run that asks about a uniform sample of documents; see `draws`."""
    return f"{DRAW} < {share:.9f}"


def drawn_from(limit: str, shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """The shards of which the condition of a run may accept a document; one shard at least.

    A sample of a large corpus has no document of most shards, whose texts need not be read.
    """
    name, _, share = limit.partition(" < ")
    if name != DRAW:
        return tuple(shards)
    drawn = [shard for shard in shards if len(drawn_rows(shard.id, shard.rows, float(share))[0])]
    return tuple(drawn or shards[:1])


def drawn_rows(sid: str, rows: int, share: float) -> tuple[NDArray[np.int64], Bools]:
    """The rows of a shard that are in a sample, and which of these are in its first half."""
    drawn = draws(sid, rows)
    own = np.flatnonzero(drawn < share)
    return own, drawn[own] < share / 2


def draws(sid: str, rows: int) -> NDArray[np.float64]:
    """[docs] of a shard: a number from 0 to 1 for each document, which follows from its place.

    So a share of the draws is a uniform sample of documents, also where many have the same text.
    They are the outputs of SplitMix64 (Steele, Lea and Flood, 2014) from the shard's id.
    """
    steps = np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = steps + np.uint64(int(sid[:16], 16))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))) / np.float64(2**64)


def _input_names(limit: str) -> list[str]:
    """The columns of the input that the condition of a run names, with or without `doc.`."""
    bare = [name for name in names_in(limit, place=WHERE) if name not in (*_COLUMNS, DOC, DRAW)]
    return list(dict.fromkeys([*bare, *fields_in(limit, DOC, place=WHERE)]))


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


def input_names(tasks: Iterable[TaskSpec]) -> list[str]:
    """The columns of the input that the conditions of these tasks name."""
    named = (fields_in(task.when, DOC, place="when") for task in tasks if task.when is not None)
    return list(dict.fromkeys(chain.from_iterable(named)))


def accepted_by(
    spec: JobSpec,
    task: TaskSpec,
    documents: pa.Table,  # with the columns of a documents file
    answers: Mapping[str, pa.StructArray],  # [docs] by task that the condition names
    values: pa.Table | None,  # [docs] the columns of the input that conditions name
) -> tuple[Bools, int]:
    """[docs]: which documents the condition of a task accepts; on how many it fails."""
    assert task.when is not None, task.name
    place = spec.tasks.index(task)
    types = _types(spec.tasks[:place])
    known = {name: cast_rows(rows, types[name]) for name, rows in answers.items()}
    columns = _of_documents(documents) | _of_input(values, documents.num_rows) | known
    return _accepted(task.when, columns, place=f"tasks.{place}.when")


def _of_documents(documents: pa.Table) -> dict[str, pa.Array]:
    """[docs]: the columns that every condition may name."""
    hashes = documents.column("content_hash").combine_chunks().cast(pa.string())
    return {
        "doc_id": documents.column("doc_id").combine_chunks(),
        "n_chars": documents.column("n_chars").combine_chunks().cast(pa.int64()),
        "sample": pa.array(leading_bits(hashes) / np.float64(2**64)),
    }


def _of_input(values: pa.Table | None, rows: int, *, bare: bool = False) -> dict[str, pa.Array]:
    """[rows]: columns of the input as the struct `doc`; with `bare` also by their own names."""
    if values is None or not values.num_columns:
        return {}
    # — rows that cannot be read have no values
    fields = {
        name: pa.concat_arrays(
            [column.combine_chunks(), pa.nulls(rows - values.num_rows, column.type)]
        )
        for name, column in zip(values.column_names, values.columns, strict=True)
    }
    struct = pa.StructArray.from_arrays([*fields.values()], names=[*fields])
    return {**(fields if bare else {}), DOC: struct}


def _types(tasks: Sequence[TaskSpec]) -> dict[str, pa.StructType]:
    """By task, the type of its answers in the scope of a condition.

    `stage` is null without a cascade, and where the last stage of one answers everything.
    """
    return {
        task.name: answers_type(
            list(dict.fromkeys([*answer_columns(task), STAGE])), list(task.labels)
        )
        for task in tasks
    }


def _accepted(sql: str, columns: Mapping[str, pa.Array], *, place: str) -> tuple[Bools, int]:
    """[docs]: which documents a condition accepts, and on how many it cannot be computed.

    It may name the columns, [docs] each. Null means no, and so does a value that cannot be
    computed, or a column of another type.
    """
    rows = pa.record_batch(list(columns.values()), names=list(columns))
    try:
        rule = Rule(sql, rows.schema, place=place)
    except SpecError:  # — of a file without a column, or with one of another type
        return np.zeros(rows.num_rows, np.bool_), rows.num_rows
    met = rule.verdicts(rows)
    failed = rule.failures(rows) if met.null_count else 0
    return np.array(pc.fill_null(met, False).to_numpy(zero_copy_only=False), np.bool_), failed


def _first_values(
    shards: Iterable[Shard], names: Sequence[str], options: Options
) -> list[pa.Table]:
    """These columns (`input_columns`) in the first rows of the input, shard by shard."""
    parts, rows = list[pa.Table](), 0
    for shard in shards:
        if (count := min(shard.rows, SAMPLE_ROWS - rows)) <= 0:
            break
        rows += count
        parts.append(input_columns(shard, names, options, count))
    return parts


def input_columns(
    shard: Shard, names: Sequence[str], options: Options, count: int | None = None
) -> pa.Table:
    """These columns of the shard's rows, or of its first `count`.

    Rows at its end may be missing: those from a place on that cannot be read. A table without one
    of the columns does not have it. In a format without a schema, a column is of the type that its
    values share, or of strings. StorageError if the object is not the version that was cut,
    SpecError if a table has two columns of one name.
    """
    count = shard.rows if count is None else count
    if shard.version.format not in TABLES:
        return _values(shard, names, options, count)
    schema, batches, rows = pa.schema([]), list[pa.RecordBatch](), 0
    try:
        with reading(shard.path), opened_table(shard, options) as table:
            present = [name for name in names if name in table.schema.names]
            if twins := [name for name in present if table.schema.names.count(name) > 1]:
                fix = f"{shard.path} has several columns of this name; rename all but one"
                raise SpecError([Problem("input.path", fix, twins[0])])
            schema = pa.schema([table.schema.field(name) for name in present])
            for batch in table.batches(present) if present else ():
                batches.append(batch.select(present))
                rows += batch.num_rows
                if rows >= count:
                    break
    except UnreadableError:  # — the other columns may be intact
        check_unchanged(shard, options)
    return pa.Table.from_batches(batches, schema).slice(0, count)


def _values(shard: Shard, names: Sequence[str], options: Options, count: int) -> pa.Table:
    """The columns in the first rows of a shard whose format has no schema."""
    columns: dict[str, list[object]] = {name: [] for name in names}
    for row in islice(read_rows(shard, options, list(names)), count):
        for name, values in columns.items():
            value = None if row.problem is not None else row.values.get(name)
            held = None if isinstance(value, TooLong) else value
            values.append(id_text(held) if isinstance(held, bytes) else held)
    return pa.table({name: _array(values) for name, values in columns.items()})


def _array(values: list[object]) -> pa.Array:
    """The values as a column of the type that they share, or as strings."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, UnicodeError):  # JSON has any integer, half a pair
        return pa.array([None if value is None else id_text(value) for value in values])
