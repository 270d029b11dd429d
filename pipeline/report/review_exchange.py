"""What went to another annotation tool, or came back, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.report.console import Part, printed
from pipeline.verbs.review_exchange import ExportedReview, ImportedReview

_NEXT = {
    "label-studio": "paste {settings} into the project's labelling interface, then import {file}",
    "argilla": "make a dataset with Settings.from_json({settings!r}), then "
    "dataset.records.from_json({file!r})",
    "jsonl": "fill in label and by in {file}",
    "csv": "fill in label and by in {file}",
}


@printed
def show_exported_review(exported: ExportedReview) -> Iterator[Part]:
    """The counts, and what to do with the files."""
    yield [
        ("task", exported.task),
        ("documents", f"{exported.documents:,}"),
        ("answers of people", f"{exported.answers:,}"),
        ("answers of the model", f"{exported.predictions:,}"),
        ("file", exported.file),
        ("next", _NEXT[exported.tool].format(file=exported.file, settings=exported.settings)),
    ]


@printed
def show_imported_review(imported: ImportedReview) -> Iterator[Part]:
    """The answers that were added, and whose they are."""
    yield [
        ("task", imported.task),
        ("added answers", f"{imported.added:,}"),
        *((f"of {person}", f"{count:,}") for person, count in imported.people.items()),
        ("known answers", f"{imported.known:,}"),
        ("gold file", imported.to),
    ]
