"""What holds for the rows of every label file, and which rows break it.

Knows the columns of label and documents files. Knows nothing of keys, stores or where rows lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.ledger.columns import CALIBRATED, CALIBRATED_COLUMNS, calibrated_type
from pipeline.ledger.label_rows import P_SUM_TOLERANCE
from pipeline.sources.documents import EMPTY, OK, QUARANTINED, TRUNCATED

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


RankedRows = NDArray[np.bool_]  # [docs]: those that break a rule
# One subtraction of float32 numbers below 1 is off by less.
_TOLERANCE = 1e-6


def ranked_rules(table: pa.Table, labels: Sequence[str]) -> Iterator[tuple[str, RankedRows]]:
    """The rules of `top`, of a row that has one."""
    top = table.column("top").combine_chunks()
    docs, names, p = _flat(top)
    rows = len(top)
    unknown = ~_ranked_numpy(pc.is_in(names, value_set=pa.array(list(labels), pa.string())))
    yield "top has a label that was not published", _any(docs[unknown], rows)
    yield "top is not between 0 and 1", _any(docs[~((p > 0) & (p <= 1 + P_SUM_TOLERANCE))], rows)
    yield "top does not fall", _any(docs[1:][(docs[1:] == docs[:-1]) & ~(p[1:] <= p[:-1])], rows)
    sums = np.bincount(docs, weights=p, minlength=rows)
    yield "top sums to more than 1", sums > 1 + P_SUM_TOLERANCE
    counts = np.bincount(docs, minlength=rows)
    there = _ranked_numpy(top.is_valid())
    yield "top is empty", there & (counts == 0)
    first = np.concatenate([[0], np.cumsum(counts)])[:-1]
    answered = there & (counts > 0)
    best = np.array(_ranked_strings(table, "label"), dtype=object)
    leading = np.full(rows, None, dtype=object)
    leading[answered] = np.array(names.to_pylist(), dtype=object)[first[answered]]
    yield "label is not the first of top", answered & (best != leading)
    yield (
        "margin is not the first probability minus the second",
        _off_margin(table, p, first, counts, answered),
    )


def level_rules(table: pa.Table) -> Iterator[tuple[str, RankedRows]]:
    """The rules of `levels`, of a row that has them."""
    levels = table.column("levels").combine_chunks()
    docs, names, p = _flat(levels)
    rows = len(levels)
    labelled = _ranked_numpy(table.column("label").is_valid())
    yield (
        "levels is there without a label, or not with one",
        _ranked_numpy(levels.is_valid()) != labelled,
    )
    yield "levels is not between 0 and 1", _any(docs[~((p >= 0) & (p <= 1))], rows)
    risen = (docs[1:] == docs[:-1]) & ~(p[1:] <= p[:-1] + P_SUM_TOLERANCE)
    yield "a level is likelier than what it lies below", _any(docs[1:][risen], rows)
    best = _ranked_strings(table, "label")
    beside = [
        not (best[d] or "").startswith(n) for d, n in zip(docs, names.to_pylist(), strict=True)
    ]
    yield "a level is not of the label's path", _any(docs[np.array(beside, dtype=bool)], rows)


def _off_margin(
    table: pa.Table,
    p: NDArray[np.float64],
    first: NDArray[np.integer],
    counts: NDArray[np.integer],
    answered: RankedRows,
) -> RankedRows:
    """Where one label is kept, the second is not known: the margin is at most the first."""
    margin = np.asarray(table.column("margin").to_numpy(zero_copy_only=False), dtype=np.float64)
    padded = np.concatenate([p, [0.0, 0.0]])
    known = padded[first] - np.where(counts > 1, padded[np.minimum(first + 1, len(p))], 0)
    off = ~(np.abs(margin - known) <= _TOLERANCE)
    above = ~((margin >= 0) & (margin <= padded[first] + _TOLERANCE))
    return np.asarray(answered & np.where(counts > 1, off, above), dtype=np.bool_)


def _flat(
    lists: pa.ListArray,
) -> tuple[NDArray[np.int64], pa.Array, NDArray[np.float64]]:
    """Each entry's row, its label and its probability."""
    docs = np.asarray(pc.list_parent_indices(lists).to_numpy(), dtype=np.int64)
    entries = lists.flatten()
    p = np.asarray(entries.field("p").to_numpy(zero_copy_only=False), dtype=np.float64)
    return docs, entries.field("label"), p


def _any(docs: NDArray[np.int64], rows: int) -> RankedRows:
    """The rows that are named."""
    found = np.zeros(rows, dtype=bool)
    found[docs] = True
    return found


def _ranked_strings(table: pa.Table, column: str) -> list[str | None]:
    strings: list[str | None] = table.column(column).cast(pa.string()).to_pylist()
    return strings


def _ranked_numpy(mask: pa.Array | pa.ChunkedArray) -> RankedRows:
    return np.asarray(mask.to_numpy(zero_copy_only=False), dtype=np.bool_)
