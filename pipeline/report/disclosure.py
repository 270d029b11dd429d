"""Texts to publish about a labelled and filtered corpus, as Markdown and as plain text.

Entry points: `dataset_card` and `public_summary`. All numbers are those of a report.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.filters.removal import FilterReport, unanswered_words
from pipeline.report.console import interval, truncate
from pipeline.report.evaluation_table import gold_words
from pipeline.verbs.corpus_report import CorpusReport

SHOWN_LABELS = 12
HASH_CHARS = 12  # of the hash of a file
_CHARS = 200  # of a question
_SQL_CHARS = 2_000  # of the condition in the public summary


def filter_text(report: CorpusReport) -> str:
    """How much the filter keeps and drops, in one sentence."""
    kept, dropped = report.whole
    whole = kept.documents + dropped.documents
    if report.filter and report.filter.stops:
        unanswered = unanswered_words(report.filter.failed, whole)
        return f"It stops, because {unanswered} and on_error is fail: it removes no document."
    return (
        f"It keeps {kept.documents:,} of {whole:,} documents and drops {dropped.documents:,} "
        f"({dropped.documents / max(1, whole):.1%}; {dropped.chars:,} characters, "
        f"{dropped.tokens:,} tokens)."
    )


def public_summary(report: CorpusReport) -> str:
    """A text for the section on data processing of the public summary of training content.

    The summary is that of Article 53(1)(d) of Regulation (EU) 2024/1689, whose template asks for
    the measures against illegal content.
    """
    names = ", ".join(task.task for task in report.tasks)
    lines = [
        f"{sum(size.documents for size in report.whole):,} documents of this source were "
        f"classified by {_labeller(report)} before training. The labels are: {names}.",
    ]
    if report.partial:
        lines.append("Other documents of this source were not classified.")
    if report.filter is None:
        lines.append("No rule removes documents by these labels.")
    else:
        lines.append(f"This rule keeps documents: {report.filter.rule}.")
        if not report.filter.stops:
            lines.append(_removal_sentence(report.filter))
        lines.append(filter_text(report))
    if report.quality is not None:
        lines += _quality(report)
    lines.append("Complete this text where other measures were taken, and have it checked.")
    return "\n".join(lines)


def dataset_card(report: CorpusReport) -> str:
    """A section of a dataset card, in Markdown."""
    lines = [f"## Labels of {_plain(report.spec)}", ""]
    lines.append(
        f"The documents were labelled by assay with {_plain(_labeller(report))} (snapshot "
        f"{report.snapshot}, {report.labelled_at})."
    )
    lines += ["", "| task | question | labels | version |", "|---|---|---|---|"]
    for task in report.tasks:
        answered = sum(task.labels.values())
        largest = sorted(task.labels.items(), key=lambda each: -each[1])[:SHOWN_LABELS]
        shares = ", ".join(f"{_plain(name)} {count / answered:.1%}" for name, count in largest)
        cells = (_plain(task.task), _plain(task.question or "trained readout or classifier"))
        lines.append(f"| {cells[0]} | {cells[1]} | {shares} | `{task.fingerprint}` |")
    if report.filter is not None:
        lines += [
            "",
            "## Filter",
            "",
            f"This rule keeps documents: {_code(report.filter.rule)}. {filter_text(report)}",
        ]
        if not report.filter.stops:
            lines += ["", "It removes the documents for which this SQL condition is true:", ""]
            lines += _fenced(report.filter.removes)
    if report.quality is not None:
        lines += ["", "## Quality", "", *(f"- {_plain(line)}" for line in _quality(report))]
    return "\n".join(lines) + "\n"


def _removal_sentence(filter: FilterReport) -> str:
    """The SQL of what the filter removes, or where it is; a rule can have thousands of groups."""
    if len(filter.removes) > _SQL_CHARS:
        return "It removes the documents for which the SQL condition of the dataset card is true."
    return f"It removes the documents for which this SQL condition is true: {filter.removes}."


def _code(text: str) -> str:
    """The text as code in a line of Markdown, whatever backticks it has."""
    fence = "`" * (_longest_fence(text) + 1)
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"


def _fenced(sql: str) -> tuple[str, str, str]:
    """A block of code in Markdown."""
    fence = "`" * max(3, _longest_fence(sql) + 1)
    return f"{fence}sql", sql, fence


def _longest_fence(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _labeller(report: CorpusReport) -> str:
    """The model by its name and the hash of its weights; classifiers alone have no model."""
    hashes = {hash[:HASH_CHARS] for each in report.tasks for hash in each.weights.values()}
    weights = f" (weights {', '.join(sorted(hashes))})" if hashes else ""
    return f"the model {report.model}{weights}" if report.model else f"text classifiers{weights}"


def _quality(report: CorpusReport) -> Iterator[str]:
    if report.quality is None:
        return
    for task in report.quality.tasks:
        if not task.versions:
            continue
        accuracy = next(iter(task.versions.values())).scores.headlines["accuracy"]
        by = gold_words(report.quality.gold, task.task)
        yield (
            f"{task.task}: accuracy {interval(accuracy)}, with its 95 % interval, on "
            f"{task.rows.evaluated:,} documents, compared with {by}"
        )


def _plain(text: str) -> str:
    """The text without the characters that Markdown and HTML give a meaning."""
    shown = truncate(text, _CHARS)
    return "".join(f"\\{char}" if char in r"\`*_{}[]<>#|" else char for char in shown)
