"""What holds for the rows of every label file, and which rows break it: `broken_answers`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.ledger.label_rows import P_SUM_TOLERANCE
from pipeline.sources.documents import EMPTY, OK, QUARANTINED, TRUNCATED

ANSWERED = (OK, TRUNCATED)
UNANSWERED = (EMPTY, QUARANTINED)
ERROR = "error:"
# The rounding error of one subtraction of float32 numbers below 1 is smaller.
MARGIN_TOLERANCE = 1e-6
MARGIN_RULE = "margin is not the first probability minus the second"

Mask = NDArray[np.bool_]  # [docs]
Rule = tuple[str, Mask]  # what is wrong, and the rows for which it is wrong


def broken_answers(table: pa.Table, labels: Sequence[str]) -> Iterator[str]:
    """The rows of a label file that cannot be a model's answers, one line for each rule."""
    ranked = "p" not in table.column_names
    names = list(labels) if ranked else [field.name for field in table.schema.field("p").type]
    if names != list(labels):
        yield f"p has the labels {names}, and {list(labels)} were published"
        return
    status = _strings(table, "status")
    answered = _mask(pc.is_in(status, value_set=pa.array(ANSWERED)))
    rules = [*_status_rules(table, "top" if ranked else "p", status, answered)]
    rules += _ranked_rules(table, labels) if ranked else _p_rules(table, labels, answered)
    if "levels" in table.column_names:
        rules += _level_rules(table)
    yield from _broken(rules)


def _status_rules(
    table: pa.Table, probabilities: str, status: pa.Array, answered: Mask
) -> Iterator[Rule]:
    yield "status is unknown", ~_is_known(status, (*ANSWERED, *UNANSWERED))
    for column in ("label", probabilities, "margin"):
        yield _only_with(column, "an answer", _mask(table.column(column).is_valid()), answered)
    mass = _floats(table.column("mass"))
    yield "mass is not null without an answer", ~np.isnan(mass) & ~answered
    # — the mass of a trained readout is null; any other is a probability
    yield "mass is not above 0 and at most 1", ~np.isnan(mass) & ~((mass > 0) & (mass <= 1))


def _p_rules(table: pa.Table, labels: Sequence[str], answered: Mask) -> Iterator[Rule]:
    """The rules of `p`, which has a probability for every label."""
    columns = table.column("p").combine_chunks().flatten()
    p = np.stack([_floats(column) for column in columns], axis=1)  # [docs, labels]
    finite = answered & np.isfinite(p).all(axis=1)
    yield "p is not a number", answered & ~finite
    p = np.where(finite[:, None], p, 0)
    yield "p is not between 0 and 1", finite & ((p < 0) | (p > 1 + P_SUM_TOLERANCE)).any(axis=1)
    yield "p does not sum to 1", finite & (np.abs(p.sum(axis=1) - 1) > P_SUM_TOLERANCE)
    best = pc.index_in(_strings(table, "label"), value_set=pa.array(list(labels), pa.string()))
    index = np.asarray(pc.fill_null(best, -1).to_numpy(), dtype=np.int64)
    p_label = np.where(index < 0, -1, p[np.arange(len(p)), index])
    yield "label is not the most probable", finite & (p_label != p.max(axis=1))
    second, first = np.sort(p, axis=1)[:, -2:].T
    margin = _floats(table.column("margin"))
    wrong = ~(np.abs(margin - (first - second)) <= MARGIN_TOLERANCE)  # also where it is NaN
    yield MARGIN_RULE, finite & wrong


def _ranked_rules(table: pa.Table, labels: Sequence[str]) -> Iterator[Rule]:
    """The rules of `top`, which has the most probable labels alone."""
    top = table.column("top").combine_chunks()
    docs, names, p = _entries(top)
    rows, every = len(top), np.arange(len(top))
    unknown = ~_mask(pc.is_in(names, value_set=pa.array(list(labels), pa.string())))
    yield "top has a label that was not published", np.isin(every, docs[unknown])
    outside = ~((p > 0) & (p <= 1 + P_SUM_TOLERANCE))
    yield "top is not between 0 and 1", np.isin(every, docs[outside])
    ascends = (docs[1:] == docs[:-1]) & ~(p[1:] <= p[:-1])
    yield "top is not in descending order", np.isin(every, docs[1:][ascends])
    sums = np.bincount(docs, weights=p, minlength=rows)
    yield "top sums to more than 1", sums > 1 + P_SUM_TOLERANCE
    counts = np.bincount(docs, minlength=rows)
    present = _mask(top.is_valid())
    yield "top is empty", present & (counts == 0)
    answered = present & (counts > 0)
    first = np.concatenate([[0], np.cumsum(counts)])[:-1]  # [docs]: index of its first entry
    label = np.array(_strings(table, "label").to_pylist(), dtype=object)
    leading = np.full(rows, None, dtype=object)
    leading[answered] = np.array(names.to_pylist(), dtype=object)[first[answered]]
    yield "label is not the first of top", answered & (label != leading)
    margin = _floats(table.column("margin"))
    padded = np.concatenate([p, [0.0, 0.0]])
    second = np.where(counts > 1, padded[np.minimum(first + 1, len(p))], 0)
    wrong = ~(np.abs(margin - (padded[first] - second)) <= MARGIN_TOLERANCE)
    # — with one label the second probability is unknown, and the margin is at most the first
    impossible = ~((margin >= 0) & (margin <= padded[first] + MARGIN_TOLERANCE))
    yield MARGIN_RULE, answered & np.where(counts > 1, wrong, impossible)


def _level_rules(table: pa.Table) -> Iterator[Rule]:
    """The rules of `levels`, the path from the root of a taxonomy to the label."""
    levels = table.column("levels").combine_chunks()
    docs, names, p = _entries(levels)
    every = np.arange(len(levels))
    labels = _strings(table, "label")
    yield _only_with("levels", "a label", _mask(levels.is_valid()), _mask(labels.is_valid()))
    yield "levels is not between 0 and 1", np.isin(every, docs[~((p >= 0) & (p <= 1))])
    ascends = (docs[1:] == docs[:-1]) & ~(p[1:] <= p[:-1] + P_SUM_TOLERANCE)
    yield "a level is more probable than its parent", np.isin(every, docs[1:][ascends])
    best = labels.to_pylist()
    beside = [
        not (best[doc] or "").startswith(name)
        for doc, name in zip(docs, names.to_pylist(), strict=True)
    ]
    yield "a level is not on the label's path", np.isin(every, docs[np.array(beside, dtype=bool)])


def _broken(rules: Iterable[Rule]) -> Iterator[str]:
    return (_line(text, rows) for text, rows in rules if rows.any())


def _line(text: str, rows: Mask) -> str:
    """The rule and the rows that break it, counted from 0 within the file."""
    count, first = int(rows.sum()), int(np.argmax(rows))
    return f"{text} in row {first}" + (f" and {count - 1} more" if count > 1 else "")


def _only_with(column: str, what: str, present: Mask, expected: Mask) -> Rule:
    return f"{column} is null with {what}, or not null without one", present != expected


def _is_known(status: pa.Array, known: Sequence[str]) -> Mask:
    is_error = pc.fill_null(pc.starts_with(status, ERROR), False)
    return _mask(pc.or_(pc.is_in(status, value_set=pa.array(known)), is_error))


def _entries(lists: pa.ListArray) -> tuple[NDArray[np.int64], pa.Array, NDArray[np.float64]]:
    """For each entry of all lists: its row, its label and its probability."""
    docs = np.asarray(pc.list_parent_indices(lists).to_numpy(), dtype=np.int64)
    entries = lists.flatten()
    return docs, entries.field("label"), _floats(entries.field("p"))


def _strings(table: pa.Table, column: str) -> pa.Array:
    return table.column(column).cast(pa.string()).combine_chunks()


def _floats(values: pa.Array | pa.ChunkedArray) -> NDArray[np.float64]:
    """The values; null is NaN."""
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64)


def _mask(mask: pa.Array | pa.ChunkedArray) -> Mask:
    return np.asarray(mask.to_numpy(zero_copy_only=False), dtype=np.bool_)
