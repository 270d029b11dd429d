"""What a review prints at its end."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.report.console import Grid, Part, number, printed
from pipeline.verbs.review import Reviewed


@printed
def show_reviewed(reviewed: Reviewed, *, command: str) -> Iterator[Part]:
    """Labels, who agrees with whom, and what to run next."""
    facts = [("labels", f"{reviewed.labels:,} of {reviewed.task}, in {reviewed.to}")]
    if reviewed.labels:
        counts_of_labels = (f"{count:,} {name}" for name, count in reviewed.by_label.items())
        facts.append(("by label", ", ".join(counts_of_labels)))
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
        agreements = [
            (*pair.people, f"{pair.documents:,}", f"{pair.alike:,}", number(pair.kappa))
            for pair in reviewed.agreements
        ]
        names = ("person", "other person", "documents", "alike", "kappa")
        yield Grid("Agreement of people", names, agreements, texts=2)
    if reviewed.labels:
        yield from ("", f"next: {command}")
