"""Texts to publish about a labelled and filtered corpus, as Markdown and as plain text.

Entry points: `dataset_card` and `public_summary`, which fill in `card.md` and `summary.txt`. All
numbers are those of a report.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.filters.removal import unanswered_words
from pipeline.report.console import interval, truncate
from pipeline.report.evaluation_table import gold_words
from pipeline.verbs.corpus_report import CorpusReport

HASH_CHARS = 12  # of the hash of a file
_CHARS = 200  # of a question


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
    return _rendered("summary.txt", report)


def dataset_card(report: CorpusReport) -> str:
    """A section of a dataset card, in Markdown."""
    return _rendered("card.md", report) + "\n"


def _rendered(name: str, report: CorpusReport) -> str:
    text = (
        _environment()
        .get_template(name)
        .render(
            report=report,
            documents=sum(size.documents for size in report.whole),
            labeller=_labeller(report),
            filter=filter_text(report),
            quality=list(_quality(report)),
        )
    )
    return text.rstrip("\n")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"thousands": "{:,}".format, "plain": _plain}
    environment.filters |= {"code": _code, "fenced": _fenced}
    return environment


def _code(text: str) -> str:
    """The text as code in a line of Markdown, whatever backticks it has."""
    fence = "`" * (_longest_fence(text) + 1)
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"


def _fenced(sql: str) -> str:
    """A block of code in Markdown."""
    fence = "`" * max(3, _longest_fence(sql) + 1)
    return f"{fence}sql\n{sql}\n{fence}"


def _longest_fence(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _labeller(report: CorpusReport) -> str:
    """The model by its name and the hash of its weights; classifiers alone have no model."""
    hashes = {hash[:HASH_CHARS] for task in report.tasks for hash in task.weights.values()}
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
