"""Tables of documents and people's labels, JSON lines or CSV, to fill in with any program.

Entry points: `table`, which has a row for each answer, and one to fill in for each document without
an answer; and `read_table`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import pyarrow as pa

from pipeline.errors import Option, Problem, SpecError
from pipeline.gold.files import GoldRows
from pipeline.gold.people import GoldLine
from pipeline.gold.values import BETWEEN, NONE
from pipeline.hashes import parse_json
from pipeline.ledger.flat import defuse_formulas
from pipeline.review.exchange import Lines, Origin, Record, predicted
from pipeline.spec.tasks import TaskSpec

# The columns to fill in are `label` and `by`.
COLUMNS = (
    *("doc_id", "content_hash", "task", "question", "labels", "text", "predicted", "label", "by"),
    *("action", "at", "seconds", "fp", "p", "blind", "chosen"),
)
_ACTIONS = ("label", "skip", "flag")


def table(records: Iterable[Record], task: TaskSpec, format: Literal["jsonl", "csv"]) -> bytes:
    """The rows of the records. No cell of CSV is a formula to a spreadsheet."""
    rows = [row for record in records for row in _rows(record, task)]
    if format == "jsonl":
        return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        cells = pa.array([_cell(row[name], name) for name in COLUMNS], pa.large_string())
        writer.writerow(defuse_formulas(pa.chunked_array([cells])).to_pylist())
    return file.getvalue().encode()


def _rows(record: Record, task: TaskSpec) -> Iterator[dict[str, Any]]:
    origin = record.origin
    names = predicted(origin, task)
    row = dict.fromkeys(COLUMNS)
    row |= {name: getattr(origin, name) for name in ("doc_id", "content_hash", "task", "question")}
    row |= {"labels": list(origin.labels), "text": record.text, "fp": origin.fp, "p": origin.p}
    if origin.p is not None:
        row["predicted"] = names if task.kind == "multi" else names[0]
    if not origin.answers:
        yield row
    for line in origin.answers:
        own = {name: getattr(line, name) for name in ("action", "label", "by", "at", "seconds")}
        shown = {name: getattr(line.shown, name) for name in ("fp", "p", "blind", "chosen")}
        yield {**row, **own, **shown}


def _cell(value: Any, name: str) -> str:
    is_listed = name in ("label", "predicted") and isinstance(value, list | tuple)
    if is_listed and not any(BETWEEN in label or label == NONE for label in value):
        return BETWEEN.join(value) or NONE
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


def read_table(rows: GoldRows, task: TaskSpec, now: str, by: str | None) -> Lines:
    """The answers in a table; rows without a label and without an action have none.

    Where a row has no time, the answer is of `now`; where it has no person, the person is `by`.
    """
    missing = [name for name in ("content_hash", "task", "label") if name not in rows.columns]
    if missing:
        fix = f"has no column {missing[0]}; keep the columns of `assay review --export`"
        raise SpecError([Problem(Option(rows.option), fix, rows.path)])
    for number in range(rows.rows):
        values = {name: rows.columns[name][number] for name in COLUMNS if name in rows.columns}
        row = {name: value for name, value in values.items() if value not in (None, "")}
        if "label" in row or "action" in row:
            place = rows.place(number)
            yield place, _line(row, place, task, now, by)


def _line(
    row: dict[str, Any], place: Option, task: TaskSpec, now: str, default_by: str | None
) -> GoldLine:
    own = {name: _parsed(row.get(name)) for name in ("labels", "p")}
    texts = {name: row.get(name) for name in ("doc_id", "content_hash", "task", "question", "fp")}
    origin = Origin.parse({**texts, **own}, place, "table")
    action = row.get("action", "label")
    if action not in _ACTIONS or (action == "label") != ("label" in row):
        fix = f"its action is not one of {', '.join(_ACTIONS)}, or does not fit its label"
        raise SpecError([Problem(place, fix, action)])
    by = row.get("by", default_by)
    if by is None:
        raise SpecError(
            [Problem(place, "has no person; fill in its column `by`, or add --person NAME")]
        )
    label = origin.label(_names(row["label"], task), task, place) if "label" in row else None
    try:
        seconds = float(row.get("seconds", 0))
    except (TypeError, ValueError):
        raise SpecError([Problem(place, "is not a number of seconds", row["seconds"])]) from None
    return origin.line(
        place,
        label,
        action,
        by=str(by),
        at=str(row.get("at", now)),
        seconds=seconds,
        blind=row.get("blind") in (True, "true"),
        chosen=str(row.get("chosen", "table")),
    )


def _names(label: Any, task: TaskSpec) -> list[str]:
    """The names in a cell."""
    if task.kind != "multi":
        return [str(label)]
    label = _parsed(label)
    if isinstance(label, str):
        label = [] if label == NONE else label.split(BETWEEN)
    return [str(name).strip() for name in label] if isinstance(label, list) else [str(label)]


def _parsed(cell: Any) -> Any:
    """The list or the object that a cell of CSV has as JSON; other values as they are."""
    if isinstance(cell, str) and cell.startswith(("[", "{")):
        try:
            return parse_json(cell)
        except ValueError:
            return cell
    return cell
