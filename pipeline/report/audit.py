"""What an audit says about a filter, for a terminal and for the page.

Entry points: `filter_grid`, `filter_facts` and `filter_words`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.evaluation.survey import Estimate
from pipeline.report.console import Grid
from pipeline.verbs.audit import HALF_WIDTH, FilterQuality

_MEANINGS = {
    "precision": "of dropped documents, the share that should be dropped",
    "recall": "of documents that should be dropped, the share that is",
    "prevalence": "the share of all documents that should be dropped",
}


def filter_grid(quality: FilterQuality) -> Grid:
    """The estimates with their intervals, and how many labels more each needs."""
    rows = []
    for name, meaning in _MEANINGS.items():
        of: Estimate = getattr(quality, name)
        more = "-" if of.more_labels is None else f"{of.more_labels:,}"
        rows.append((name, meaning, _interval(of), f"{of.labels:,}", more))
    enough = f"labels for +-{100 * HALF_WIDTH:g} points"
    return Grid("the filter", ("", "", "95 % interval", "labels", f"more {enough}"), rows, texts=3)


def filter_facts(quality: FilterQuality) -> Iterator[tuple[str, str]]:
    """What is judged, by which labels: names and values."""
    yield "rule", quality.rule
    yield "labels", f"{quality.labels:,} of {quality.drawn:,} texts drawn from {quality.texts:,}"
    yield "drawn from", f"snapshot {quality.sampled_snapshot:08d}, with the earlier rule"
    if quality.sampled_rule != quality.rule:
        yield "the earlier rule", quality.sampled_rule
    if quality.not_in_corpus:
        yield "not used", f"{quality.not_in_corpus:,} texts that have no answer now"
    if lacks := quality.lacks:
        yield "no estimates", lacks


def filter_words(quality: FilterQuality) -> str:
    """Precision and recall in one line."""
    if lacks := quality.lacks:
        return f"not judged: {lacks}"
    shown = (f"{name} {_interval(getattr(quality, name))}" for name in ("precision", "recall"))
    return f"{', '.join(shown)}, by {quality.labels:,} labels of people"


def _interval(of: Estimate) -> str:
    if of.estimate is None:
        return "no estimate"
    return f"{of.estimate:.3f} ({of.low:.3f} to {of.high:.3f})"
