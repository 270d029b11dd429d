"""What a review prints at its end, and when answers go to another tool or come back."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.report.console import Grid, Part, interval, number, printed
from pipeline.review.view import METRIC_NAMES, TOO_LITTLE
from pipeline.verbs.review import Reviewed
from pipeline.verbs.review_exchange import ExportedReview, ImportedReview

_NEXT = {
    "label-studio": "paste {settings} into the project's labelling interface, then import {file}",
    "argilla": "make a dataset with Settings.from_json({settings!r}), then "
    "dataset.records.from_json({file!r})",
    "jsonl": "fill in label and by in {file}",
    "csv": "fill in label and by in {file}",
}


@printed
def show_reviewed(reviewed: Reviewed, *, command: str) -> Iterator[Part]:
    """Labels, expected quality, who agrees with whom, and what to run next."""
    facts = [("labels", f"{reviewed.labels:,} of {reviewed.task}, in {reviewed.to}")]
    if reviewed.quality is not None and reviewed.metric is not None:
        name = METRIC_NAMES[reviewed.metric]
        facts.append(("expected quality", f"{name} {interval(reviewed.quality)}"))
    if reviewed.compared:
        share = reviewed.agreed / reviewed.compared
        facts.append(("as the model", f"{share:.0%} of {reviewed.compared:,} labels"))
    yield facts
    if len(reviewed.people) > 1:
        yield ""
        actions = ("label", "skip", "flag")
        rows = [
            (name, *(f"{counts.get(action, 0):,}" for action in actions))
            for name, counts in reviewed.people.items()
        ]
        yield Grid("People", ("person", "labels", "skipped", "flagged"), rows)
    if reviewed.agreements:
        yield ""
        both = [
            (*pair.people, f"{pair.documents:,}", f"{pair.alike:,}", number(pair.kappa))
            for pair in reviewed.agreements
        ]
        names = ("person", "other person", "documents", "alike", "kappa")
        yield Grid("Agreement of people", names, both, texts=2)
    if reviewed.labels_pay is False:
        yield from ("", TOO_LITTLE)
    if reviewed.labels:
        yield from ("", f"next: {command}")


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
