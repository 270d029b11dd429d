"""The reports of `export`, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.ledger.rows import INPUT, TEXT_COLUMN
from pipeline.report.console import Part, printed, truncate

if TYPE_CHECKING:
    from pipeline.verbs.export import Examples
    from pipeline.verbs.label_table import ExportResult

ID_CHARS, TEXT_CHARS = 80, 160  # two lines of a terminal
SHOWN_COLUMNS = 40


@printed
def show_examples(examples: Examples) -> Iterator[Part]:
    """For each row a line with its id and the start of its text, one with its answers, and one with
    what the model would say to each question.
    """
    answers = {f.name for f in examples.rows.schema if f.type.num_fields} - {INPUT}
    tasks = [name for name in examples.rows.schema.names if name in answers]
    without: dict[str, None] = {}  # once, in their order
    rows = examples.rows.to_pylist()
    for row, continuations in zip(rows, examples.why or ((),) * len(rows), strict=True):
        text = " ".join((row[TEXT_COLUMN] or "").split()) or f"({row['status']})"
        yield f"{truncate(row['doc_id'], ID_CHARS)}  {truncate(text, TEXT_CHARS)}"
        columns = [f"{name} {value or '-'}" for name, value in row.get(INPUT, {}).items()]
        yield "    " + ", ".join([*columns, *(f"{task} {_answer(row[task])}" for task in tasks)])
        for own in continuations:
            if own.none is None:
                words = (f"{token.text!r} {token.p:.2f}" for token in own.tokens)
                yield f"    {own.question}: the model would say {', '.join(words)}"
            else:
                without[f"{own.question}: {own.none}"] = None
    yield from without
    if not examples.rows.num_rows:
        yield "no document satisfies --where"
    yield (
        f"{examples.rows.num_rows:,} of {examples.documents:,} documents, "
        f"snapshot {examples.snapshot:08d} of {examples.spec}"
    )


def _answer(answer: Mapping[str, Any]) -> str:
    """`clean 0.81`; of several labels all that apply, `law 0.93 + art 0.55`; a score is
    `2.31 (3 0.48)`.
    """
    status = "" if answer["status"] == "ok" else f" ({answer['status']})"
    if answer["margin"] is None:
        return f"-{status}"
    if "labels" in answer:
        labels = (f"{label} {answer['p'][label]:.2f}" for label in answer["labels"])
        return f"{' + '.join(labels) or 'no label'}{status}"
    label = answer["label"]
    p = answer["p"][label] if "p" in answer else answer["top"][0]["p"]
    if "score" in answer:
        return f"{answer['score']:.2f} ({label} {p:.2f}){status}"
    return f"{label} {p:.2f}{status}"


@printed
def show_exported(exported: ExportResult) -> Iterator[Part]:
    """Where the table is, its size, and the names of its columns."""
    names = [column.name for column in exported.columns]
    more = f", and {len(names) - SHOWN_COLUMNS:,} more" if len(names) > SHOWN_COLUMNS else ""
    files = f"{exported.files:,} {'file' if exported.files == 1 else 'files'}"
    written = f"{exported.created:,} files" if exported.created != 1 else "1 file"
    if exported.format in ("delta", "iceberg", "lance"):
        files = f"a table of {exported.format}"
        written = "a version" if exported.created else "nothing: the table has this snapshot"
    facts = {
        "rows": f"{exported.rows:,} in {files}, snapshot {exported.snapshot:08d}",
        "written now": written,
        "columns": ", ".join(names[:SHOWN_COLUMNS]) + more,
    }
    if not exported.complete:
        facts["incomplete"] = (
            f"the snapshot leaves out {exported.missing_rows:,} documents and "
            f"{exported.missing_files:,} files; run again, then export again"
        )
    if exported.new_files:
        facts["not labelled yet"] = f"{exported.new_files:,} files of the input are not exported"
    yield facts
    yield f"table: {exported.glob}"
