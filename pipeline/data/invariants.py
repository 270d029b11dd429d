"""What holds for the rows of every label file, and which rows break it.

Knows the columns of label and documents files. Knows nothing of keys, stores or where rows lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.data.answer_columns import CALIBRATED, CALIBRATED_COLUMNS, calibrated_type
from pipeline.data.commit import P_SUM_TOLERANCE
from pipeline.data.documents import EMPTY, OK, QUARANTINED, TRUNCATED
from pipeline.data.ranked_invariants import level_rules, ranked_rules

ANSWERED = (OK, TRUNCATED)
UNANSWERED = (EMPTY, QUARANTINED)
READ = (OK, EMPTY)
ERROR = "error:"
# One subtraction of float32 numbers below 1 is off by less.
MARGIN_TOLERANCE = 1e-6

Rows = NDArray[np.bool_]  # [docs]: those that break a rule


def broken_answers(table: pa.Table, labels: Sequence[str]) -> Iterator[str]:
    """A label file's rows that cannot be a model's answers, a line for each rule."""
    ranked = "p" not in table.column_names
    names = list(labels) if ranked else [field.name for field in table.schema.field("p").type]
    if names != list(labels):
        yield f"p has the labels {names} where {list(labels)} were published"
        return
    answered = _answered(table)
    rules = [*_rules(table, "top" if ranked else "p", answered)]
    rules += ranked_rules(table, labels) if ranked else _probability_rules(table, labels, answered)
    rules += level_rules(table) if "levels" in table.column_names else ()
    for rule, rows in rules:
        if rows.any():
            yield _counted(rule, rows)
    if CALIBRATED in table.column_names:
        yield from _broken_calibrated(table, labels)


def _broken_calibrated(table: pa.Table, labels: Sequence[str]) -> Iterator[str]:
    """The same for what was calibrated: it is there where the raw answer is, and as well formed."""
    answers = table.column(CALIBRATED).combine_chunks()
    if answers.type != (wanted := calibrated_type(table.schema.field("p").type)):
        yield f"{CALIBRATED} is {answers.type} where {wanted} was published"
        return
    answered = _numpy(table.column("p").is_valid())
    there = _numpy(answers.is_valid())
    if (there != answered).any():
        rule = f"{CALIBRATED} is there without an answer, or not with one"
        yield _counted(rule, there != answered)
    inside = pa.table(dict(zip(CALIBRATED_COLUMNS, answers.flatten(), strict=True)))
    for rule, rows in _probability_rules(inside, labels, answered & there):
        if rows.any():
            yield _counted(f"{CALIBRATED}.{rule}", rows)


def broken_documents(table: pa.Table) -> Iterator[str]:
    """A documents file's rows that nobody can have read, a line for each rule."""
    status = _strings(table, "status")
    for column in ("doc_id", "content_hash", "n_chars"):
        rows = _numpy(table.column(column).is_null())
        if rows.any():
            yield _counted(f"{column} is null", rows)
    if (rows := ~_is_one_of(status, READ)).any():
        yield _counted("status is none that reading gives", rows)


def differing(found: pa.Array | pa.ChunkedArray, wanted: pa.Array | pa.ChunkedArray) -> str | None:
    """Where two columns are not the same, or None."""
    if len(found) != len(wanted):
        return f"{len(found)} rows for {len(wanted)}"
    if found.equals(wanted):
        return None
    same = pc.fill_null(pc.equal(found, wanted), False)
    return _counted("differs", ~_numpy(same))


def _rules(table: pa.Table, probabilities: str, answered: Rows) -> Iterator[tuple[str, Rows]]:
    status = _strings(table, "status")
    yield "status is unknown", ~_is_one_of(status, (*ANSWERED, *UNANSWERED))
    for column in ("label", probabilities, "margin"):
        there = _numpy(table.column(column).is_valid())
        yield f"{column} is there without an answer, or not with one", there != answered
    mass = _floats(table.column("mass"))
    yield "mass is there without an answer", ~np.isnan(mass) & ~answered
    # — null where the answer is a trained readout's; what is there is a probability
    yield "mass is not above 0 and at most 1", ~np.isnan(mass) & ~((mass > 0) & (mass <= 1))


def _probability_rules(
    table: pa.Table, labels: Sequence[str], answered: Rows
) -> Iterator[tuple[str, Rows]]:
    columns = table.column("p").combine_chunks().flatten()
    p = np.stack([_floats(column) for column in columns], axis=1)  # [docs, labels]
    whole = answered & np.isfinite(p).all(axis=1)
    yield "p is not a number", answered & ~whole
    p = np.where(whole[:, None], p, 0)
    yield "p is not between 0 and 1", whole & ((p < 0) | (p > 1 + P_SUM_TOLERANCE)).any(axis=1)
    yield "p does not sum to 1", whole & (np.abs(p.sum(axis=1) - 1) > P_SUM_TOLERANCE)
    best = pc.index_in(_strings(table, "label"), value_set=pa.array(list(labels), pa.string()))
    index = np.asarray(pc.fill_null(best, -1).to_numpy(), dtype=np.int64)
    of_label = np.where(index < 0, -1, p[np.arange(len(p)), index])
    yield "label is not the most probable", whole & (of_label != p.max(axis=1))
    second, first = np.sort(p, axis=1)[:, -2:].T
    margin = _floats(table.column("margin"))
    off = ~(np.abs(margin - (first - second)) <= MARGIN_TOLERANCE)  # also where it is NaN
    yield "margin is not the first probability minus the second", whole & off


def _answered(table: pa.Table) -> Rows:
    return _numpy(pc.is_in(_strings(table, "status"), value_set=pa.array(ANSWERED)))


def _counted(rule: str, rows: Rows) -> str:
    """The rule and where it is broken; rows count from 0 within the file."""
    count = int(rows.sum())
    first = int(np.argmax(rows))
    return f"{rule} in row {first}" + (f" and {count - 1} more" if count > 1 else "")


def _is_one_of(status: pa.Array, known: Sequence[str]) -> Rows:
    named = pc.is_in(status, value_set=pa.array(known))
    return _numpy(pc.or_(named, pc.fill_null(pc.starts_with(status, ERROR), False)))


def _strings(table: pa.Table, column: str) -> pa.Array:
    return table.column(column).cast(pa.string()).combine_chunks()


def _floats(values: pa.Array | pa.ChunkedArray) -> NDArray[np.float64]:
    """Null is NaN."""
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64)


def _numpy(mask: pa.Array | pa.ChunkedArray) -> Rows:
    return np.asarray(mask.to_numpy(zero_copy_only=False), dtype=np.bool_)
