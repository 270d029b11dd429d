"""The reports of `show` and `export`, for people and as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pipeline.ledger.columns import EXPLANATION
from pipeline.ledger.flat import FlatColumn, flat_columns, flatten, json_rows
from pipeline.ledger.rows import TEXT_COLUMN
from pipeline.report.console import escape_controls, truncate, two_columns

if TYPE_CHECKING:
    from pipeline.verbs.export import ExportResult
    from pipeline.verbs.show import Examples

ID_CHARS, TEXT_CHARS = 80, 160  # two lines of a terminal
SHOWN_COLUMNS = 40


def show_examples(examples: Examples, console: Console) -> None:
    """For each row its id and the start of its text, its answers, and how the model continues them.

    Each is a line of its own.
    """
    tasks = [field.name for field in examples.rows.schema if _is_task(field)]
    for row in examples.rows.to_pylist():
        text = " ".join((row[TEXT_COLUMN] or "").split()) or f"({row['status']})"
        console.print(truncate(row["doc_id"], ID_CHARS), style="bold", end="  ")
        console.print(truncate(text, TEXT_CHARS))
        console.print("    " + ", ".join(f"{task} {_answer(row[task])}" for task in tasks))
        for task in tasks:
            if explanation := row[task].get(EXPLANATION):
                text = " ".join(explanation["text"].split())
                console.print(f"    {task}, continuation: {truncate(text, TEXT_CHARS)}")
    if not examples.rows.num_rows:
        console.print("no document satisfies --where")
    console.print(
        f"{examples.rows.num_rows:,} of {examples.documents:,} documents, "
        f"snapshot {examples.snapshot:08d} of {escape_controls(examples.spec)}"
    )


def _is_task(field: Any) -> bool:
    return bool(field.type.num_fields)


def _answer(answer: Mapping[str, Any]) -> str:
    """`clean 0.81`; the calibrated answer where the task has a calibration."""
    status = "" if answer["status"] == "ok" else f" ({escape_controls(answer['status'])})"
    answer = answer.get("calibrated") or answer
    label = answer["label"]
    if label is None:
        return f"-{status}"
    p = answer["p"][label] if "p" in answer else answer["top"][0]["p"]
    return f"{escape_controls(label)} {p:.2f}{status}"


def examples_json(examples: Examples) -> dict[str, Any]:
    """The same for other programs: flat columns, and the first characters of each text."""
    rows = flatten(examples.rows, flat_columns(examples.rows.schema))
    return {
        "spec": examples.spec,
        "snapshot": examples.snapshot,
        "documents": examples.documents,
        "rows": list(json_rows(rows)),
    }


def show_exported(exported: ExportResult, console: Console) -> None:
    """Where the table is, its size, and the names of its columns."""
    names = [column.name for column in exported.columns]
    more = f", and {len(names) - SHOWN_COLUMNS:,} more" if len(names) > SHOWN_COLUMNS else ""
    files = f"{exported.files:,} {'file' if exported.files == 1 else 'files'}"
    facts = {
        "rows": f"{exported.rows:,} in {files}, snapshot {exported.snapshot:08d}",
        "written now": f"{exported.created:,} files" if exported.created != 1 else "1 file",
        "columns": ", ".join(names[:SHOWN_COLUMNS]) + more,
    }
    if not exported.complete:
        facts["incomplete"] = (
            f"the snapshot leaves out {exported.missing_rows:,} documents and "
            f"{exported.missing_files:,} files; run again, then export again"
        )
    if exported.new_files:
        facts["not labelled yet"] = f"{exported.new_files:,} files of the input are not exported"
    console.print(two_columns(facts))
    console.print(f"table: {escape_controls(exported.glob)}")


def exported_json(exported: ExportResult) -> dict[str, Any]:
    """The same for other programs."""
    return {
        "to": exported.to,
        "glob": exported.glob,
        "format": exported.format,
        "snapshot": exported.snapshot,
        "rows": exported.rows,
        "files": exported.files,
        "created": exported.created,
        "columns": [_column_json(column) for column in exported.columns],
        "missing_rows": exported.missing_rows,
        "missing_files": exported.missing_files,
        "new_files": exported.new_files,
        "complete": exported.complete,
    }


def _column_json(column: FlatColumn) -> dict[str, Any]:
    return {"name": column.name, "source": list(column.source), "type": str(column.type)}
