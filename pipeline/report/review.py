"""What a review prints at its end."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.report.console import Grid, Part, interval, number, printed
from pipeline.review.view import METRIC_NAMES, TOO_LITTLE
from pipeline.verbs.review import Reviewed


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
