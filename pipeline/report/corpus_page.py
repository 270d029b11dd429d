"""A report of an output, for people: one HTML page, a summary, JSON. Entry point: `write_report`.

The page is `page.html`, which Jinja fills in. Its texts may be hostile: all of them are escaped.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template

from pipeline.evaluation.metrics import RANKED_LABELS
from pipeline.filters.decisions import Size
from pipeline.filters.result import unanswered_words
from pipeline.report.charts import HEIGHT, histograms, score_histogram
from pipeline.report.console import Part, escape_controls, printed, truncate, warnings
from pipeline.report.drift import change_grids, drift_line, version_facts
from pipeline.report.evaluation import (
    filter_facts,
    filter_grid,
    filter_words,
    issue_grid,
    sections,
    sources,
)
from pipeline.spec.labels import task_of
from pipeline.stores.named_files import Target
from pipeline.verbs.corpus_report import DROPPED, KEPT, CorpusReport, ShownExample

SHOWN_GROUPS = 20
INSTRUCTION_CHARS = 400
_SECTIONS = {
    "answers": "Answers",
    "reasons": "Why documents are dropped",
    "groups": "Kept and dropped by group",
    "quality": "Figures of quality",
    "drift": "Changes since the snapshot before",
    "provenance": "What was labelled, and with what",
    "examples": "Examples",
}


def write_report(report: CorpusReport, target: Target, *, spec_file: str) -> None:
    """Replaces the page in one step. StorageError if it cannot be written."""
    written_at = datetime.now(UTC)
    html = page(report, spec_file=spec_file, folder=os.getcwd(), written_at=written_at)
    target.write(html.encode())


def page(report: CorpusReport, *, spec_file: str, folder: str, written_at: datetime) -> str:
    """The page's HTML; local paths are relative to the folder of the spec, a path in `folder`."""
    shown = _with_near_paths(report, os.path.dirname(os.path.join(folder, spec_file)))
    present = {
        "reasons": shown.filter,
        "examples": shown.examples,
        "quality": shown.quality,
        "drift": shown.drift,
    }
    titles = _SECTIONS if shown.filter else {**_SECTIONS, "groups": "Documents by group"}
    written = ("this page", written_at.isoformat(timespec="seconds"))

    return _template().render(
        report=shown,
        spec_file=spec_file,
        sections={name: title for name, title in titles.items() if present.get(name, True)},
        quality=list(sections(shown.quality)) if shown.quality else [],
        filter_text=_filter_text(shown),
        documents=sum(shown.whole, Size()).documents,
        doubts=report.warnings,
        steps=list(_steps(shown, spec_file)),
        examples=[
            (title, list(of)) for title, of in groupby(shown.examples, partial(_title, shown))
        ],
        statuses=list(_statuses(shown)),
        provenance=[("spec", f"{spec_file}, job {shown.spec}"), *_overview(shown), written],
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_without_controls,
    )
    environment.filters |= {
        "thousands": "{:,}".format,
        "words": shlex.join,
        "cut": truncate,
        "pairs": _pairs,
    }
    environment.globals |= {
        "share": lambda part, whole: f"{part / max(1, whole):.1%}",
        "shown_groups": SHOWN_GROUPS,
        "ranked_labels": RANKED_LABELS,
        "chart_height": HEIGHT,
        "histograms": histograms,
        "score_histogram": score_histogram,
        "sources": sources,
        "filter_grid": filter_grid,
        "filter_words": filter_words,
        "filter_facts": filter_facts,
        "issue_grid": issue_grid,
        "change_grids": change_grids,
        "drift_line": drift_line,
        "version_facts": version_facts,
    }
    return environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))


def _without_controls(value: object) -> object:
    """A text without control characters. Markup, which the template has written, stays."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return escape_controls(str(value)) if is_text else value


def _pairs(values: Mapping[str, str], chars: int | None = None) -> str:
    """Names with the first characters of their values, in the order of the names."""
    return ", ".join(f"{name} {value[:chars]}" for name, value in sorted(values.items()))


def _with_near_paths(report: CorpusReport, folder: str) -> CorpusReport:
    """The report, in which local paths near the folder are relative to it."""
    quality = report.quality
    if quality is not None:
        quality = replace(quality, output=_near(quality.output, folder))
    return replace(
        report,
        input=_near(report.input, folder),
        output=_near(report.output, folder),
        files={_near(path, folder): pair for path, pair in report.files.items()},
        quality=quality,
    )


def _near(path: str, folder: str) -> str:
    """An absolute local path relative to the folder, if it is at most two folders above."""
    if "://" in path or not os.path.isabs(path):
        return path
    relative = os.path.relpath(path, folder)
    return path if relative.split(os.sep)[:3] == [os.pardir] * 3 else relative


def _main(report: CorpusReport) -> Iterator[tuple[str, str]]:
    """Documents, what the filter does to them, and the main figures of each task."""
    whole = sum(report.whole, Size())
    partial = " (the snapshot leaves out documents of the input)" if report.partial else ""
    yield "documents", f"{whole.documents:,}{partial}"
    yield "filter", _filter_text(report) if report.filter else "The spec has no filter."
    if report.quality is not None:
        if report.quality.filter is not None:
            yield "quality of the filter", filter_words(report.quality.filter)
        yield from ((section.task, section.headline) for section in sections(report.quality))


def _steps(report: CorpusReport, spec_file: str) -> Iterator[tuple[str, Sequence[str]]]:
    """What to do next in words, each with the words of a command, or with none."""
    if report.partial or report.older_answers:
        yield "bring the output up to date", ["assay", "run", spec_file]
    if report.quality is None:
        named = ["--task", report.tasks[0].task] if len(report.tasks) > 1 else []
        review = ["assay", "review", spec_file, *named, "--to", "gold.jsonl"]
        yield "label some documents to know how good the answers are", review
        return
    source, tasks = report.quality.gold.source, report.quality.tasks.values()
    fitted = {own.task for own in report.tasks if own.readout is not None}
    for task in tasks:
        if task.at_chance:
            words = ["assay", "fit", spec_file, "--gold", source, "--task", task.task]
            # — a readout that has answered is not replaced
            words += ["--to", "FOLDER"] if task_of(task.task) in fitted else []
            yield f"{task.task}: train a readout", words
        if task.mislabelled:
            issues = f"{len(task.mislabelled):,} gold labels that may be wrong"
            yield f"{task.task}: read the {issues}, below", []
        if task.swapped:
            yield f"{task.task}: check which label each value of the gold means", []
    if report.filter and report.filter.stops:
        yield "decide about documents without an answer: filter.on_error", []
    elif all(task.scores and not task.at_chance and not task.swapped for task in tasks):
        step = "write a rule as filter.keep in the spec, then run"
        if report.filter:
            step = "write the documents that the rule keeps"
        yield step, ["assay", "filter", spec_file, "--to", "FOLDER"]


def _title(report: CorpusReport, shown: ShownExample) -> str:
    """The title above a document that is shown."""
    kept = "Kept by the filter" if report.filter else "Any documents"
    of = shown.example
    titles = {KEPT: kept, DROPPED: "Dropped by the filter"}
    return titles.get(of.kind, f"{of.task}, the least sure first")


def _filter_text(report: CorpusReport) -> str:
    """How much the filter keeps and drops, in one sentence."""
    kept, dropped = report.whole
    whole = kept.documents + dropped.documents
    if report.filter and report.filter.stops:
        unanswered = unanswered_words(report.filter.failed, whole)
        return f"The filter stops, because {unanswered} and on_error is fail; nothing is removed."
    return (
        f"{kept.documents:,} of {whole:,} documents are kept, {dropped.documents:,} are dropped "
        f"({dropped.documents / max(1, whole):.1%}; {dropped.chars:,} characters, "
        f"{dropped.tokens:,} tokens)."
    )


def _statuses(report: CorpusReport) -> Iterator[tuple[str, str]]:
    """The tasks, and how many documents have which status; tasks with equal counts are one row."""
    alike: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for task in report.tasks:
        alike.setdefault(tuple(task.statuses.items()), []).append(task.task)
    for counts, tasks in alike.items():
        of = "" if len(alike) == 1 else f" of {', '.join(tasks)}"
        yield f"status{of}", ", ".join(f"{status} {count:,}" for status, count in counts)


def _overview(report: CorpusReport) -> list[tuple[str, str]]:
    whole = sum(report.whole, Size())
    return [
        ("input", report.input),
        ("output", report.output),
        ("snapshot", f"{report.snapshot:08d}, {report.labelled_at}"),
        ("model", report.model),
        ("instruction", truncate(report.instruction, INSTRUCTION_CHARS) if report.model else ""),
        ("size", f"{whole.chars:,} characters; {whole.tokens:,} tokens that the model read"),
        *((f"{own.task}: cascade", own.cascade) for own in report.tasks if own.cascade),
    ]


@printed
def show_corpus_report(report: CorpusReport) -> Iterator[Part]:
    """How much is kept, how good the answers are, what was labelled, and every doubt."""
    rows = [*_main(report), *_statuses(report), *_overview(report)]
    if report.filter is not None:
        rows.append(("rule", report.filter.rule))
    yield [pair for pair in rows if pair[1]]
    yield from warnings(report.warnings)
