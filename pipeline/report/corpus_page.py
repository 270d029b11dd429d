"""A report of an output, for people: one HTML page, a summary, JSON. Entry point: `write_report`.

The page is `page.html`, which Jinja fills in. Its texts may be hostile: all of them are escaped.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from fsspec.implementations.local import LocalFileSystem
from jinja2 import Environment, StrictUndefined, Template
from rich.console import Console

from pipeline.errors import Problem, SpecError
from pipeline.evaluation.metrics import RANKED_LABELS
from pipeline.filters.decisions import Pairs, Size
from pipeline.filters.tally import BORDERLINE, DROPPED, KEPT, SURE, THRESHOLDS, Example, ScoreCounts
from pipeline.gold.labels import Gold
from pipeline.report.charts import Chart, curves, histograms
from pipeline.report.console import Grid, escape_controls, truncate, two_columns
from pipeline.report.disclosure import dataset_card, filter_text, public_summary
from pipeline.report.doubts import evaluation_doubts, report_doubts
from pipeline.report.drift import comparison_json, drift_line, task_grid
from pipeline.report.evaluation_table import (
    confusion_grid,
    evaluation_json,
    headline,
    issue_grid,
    row_counts,
    score_grids,
    sources,
)
from pipeline.stores.named_files import Target, open_target
from pipeline.verbs.corpus_report import CorpusReport, SubgroupReport
from pipeline.verbs.evaluate import Evaluation, TaskEvaluation

SHOWN_GROUPS = 20
SLIDER_GROUPS = 8  # the largest ones
SHOWN_ISSUES = 100
ID_CHARS = 80
INSTRUCTION_CHARS = 400
HASH_CHARS = 12
_SECTIONS = {
    "summary": "Summary",
    "reasons": "Why documents are dropped",
    "examples": "Examples",
    "thresholds": "Thresholds",
    "groups": "Kept and dropped by group",
    "answers": "Answers",
    "quality": "Quality",
    "subgroups": "False positives by subgroup",
    "drift": "Changes since the snapshot before",
    "disclosure": "Texts to publish",
    "provenance": "What was labelled, and with what",
}


def page_target(url: str, options: Mapping[str, Any], *, flag: str) -> Target:
    """The file for a page, at a path or any fsspec URL.

    Raises:
        SpecError: The URL is a folder or cannot be opened.
    """
    target = open_target(url, options, flag=flag)
    is_local = isinstance(target.file_system, LocalFileSystem)
    if url.endswith("/") or (is_local and Path(target.place).is_dir()):
        raise SpecError([Problem(flag, "is a folder; name a file", url)])
    return target


def write_report(report: CorpusReport, target: Target, *, spec_file: str) -> None:
    """Replaces the page in one step. StorageError if it cannot be written."""
    written_at = datetime.now(UTC)
    html = page(report, spec_file=spec_file, folder=os.getcwd(), written_at=written_at)
    with target.replaced() as path:
        path.write_text(html, encoding="utf-8")


def page(report: CorpusReport, *, spec_file: str, folder: str, written_at: datetime) -> str:
    """The page's HTML; local paths are relative to the folder of the spec, a path in `folder`."""
    shown = _with_near_paths(report, os.path.dirname(os.path.join(folder, spec_file)))
    present = {
        "reasons": shown.filter,
        "examples": shown.examples,
        "thresholds": shown.scores,
        "quality": shown.quality,
        "subgroups": shown.subgroups,
        "drift": shown.drift,
    }
    written = ("this page", written_at.isoformat(timespec="seconds"))
    return _template().render(
        report=shown,
        sections={name: title for name, title in _SECTIONS.items() if present.get(name, True)},
        main=list(_main(shown)),
        doubts=list(report_doubts(shown)),
        reasons=_reasons(shown),
        examples=_examples(shown),
        groups=list(_groups(shown)),
        statuses=list(_statuses(shown)),
        answers=list(_answers(shown)),
        **_threshold(shown.scores),
        **(_quality(shown.model, shown.quality, spec_file) if shown.quality else {}),
        subgroups=list(_subgroups(shown)),
        drift=[(task_grid(t), drift_line(t)) for t in (shown.drift.tasks if shown.drift else ())],
        disclosure=[
            ("For the public summary of training content", public_summary(shown)),
            ("Dataset card, in Markdown", dataset_card(shown)),
        ],
        provenance=[("spec", f"{spec_file}, job {shown.spec}"), *_overview(shown), written],
        tasks=_tasks(shown),
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
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {"thousands": "{:,}".format, "percent": _percent, "sha256": _sha256}
    return environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))


def _without_controls(value: object) -> object:
    """A text without control characters. Markup, which the template has written, stays."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return escape_controls(str(value)) if is_text else value


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


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
    yield "filter", filter_text(report) if report.filter else "The spec has no filter."
    if report.quality is not None:
        for task in report.quality.tasks:
            yield task.task, headline(task, report.quality.gold)


def _reasons(report: CorpusReport) -> Grid:
    documents = max(1, sum(report.whole, Size()).documents)
    counts = report.filter.reasons.items() if report.filter else ()
    rows = [(reason, f"{count:,}", f"{count / documents:.1%}") for reason, count in counts]
    return Grid("", ("condition", "documents", "share of all documents"), rows)


def _examples(report: CorpusReport) -> list[tuple[str, list[dict[str, str | None]]]]:
    """The examples under their titles, each with its text, its picture, and words about it."""

    def title(of: Example) -> str:
        return {
            KEPT: "Kept by the filter" if report.filter else "Any documents",
            DROPPED: "Dropped by the filter",
            SURE: f"{of.task}: {of.label}, sure",
            BORDERLINE: f"{of.task}: {of.label}, borderline",
        }[of.kind]

    def words(of: Example) -> str:
        margin = "" if of.margin is None else f", margin {of.margin:.3f}"
        reason = f", dropped: {of.reason}" if of.reason else ""
        return truncate(of.doc_id, ID_CHARS) + margin + reason

    return [
        (heading, [{**asdict(each), "words": words(each.example)} for each in shown])
        for heading, shown in groupby(report.examples, key=lambda each: title(each.example))
    ]


def _threshold(scores: Sequence[ScoreCounts]) -> dict[str, Any]:
    """A threshold that the reader moves: the numbers for it, and the table without a script."""
    starts = [round(each.threshold * (len(THRESHOLDS) - 1)) for each in scores]
    slider = [
        {"counts": _largest_groups(each.counts), "sizes": each.sizes, "start": start}
        for each, start in zip(scores, starts, strict=True)
    ]
    rows = []
    for each, start in list(zip(scores, starts, strict=True))[:1]:
        whole, dropped = sum(each.sizes[0]), sum(each.sizes[0][start + 1 :])
        share = f"{dropped / max(1, whole):.1%}"
        rows.append(("all", f"{whole:,}", f"{whole - dropped:,}", f"{dropped:,}", share))
    names = ("group", "documents", "kept", "dropped", "share")
    return {"slider": slider, "consequences": Grid("", names, rows)}


def _largest_groups(counts: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    largest = sorted(counts.items(), key=lambda each: -sum(each[1]))
    shown = {escape_controls(name): each for name, each in largest[:SLIDER_GROUPS]}
    if others := largest[SLIDER_GROUPS:]:
        rest = np.sum([each for _, each in others], axis=0).tolist()
        shown[f"{len(others):,} smaller groups"] = rest
    return shown


def _groups(report: CorpusReport) -> Iterator[Grid]:
    if report.by:
        yield _sizes(f"By {report.by}", report.groups)
    yield _sizes("By length", report.lengths)
    yield _sizes("By file", report.files)


def _sizes(title: str, pairs: Pairs) -> Grid:
    rows: list[tuple[str, ...]] = []
    for name, (kept, dropped) in list(pairs.items())[:SHOWN_GROUPS]:
        whole = kept + dropped
        share = f"{dropped.documents / max(1, whole.documents):.1%}"
        of_each = (f"{kept.documents:,}", f"{dropped.documents:,}", share)
        rows.append((name, *of_each, f"{whole.chars:,}", f"{whole.tokens:,}"))
    if len(pairs) > SHOWN_GROUPS:
        rows.append((f"{len(pairs) - SHOWN_GROUPS:,} more; --json has them all", *[""] * 5))
    names = ("", "kept", "dropped", "share dropped", "characters", "tokens")
    return Grid(title, names, rows)


def _statuses(report: CorpusReport) -> Iterator[tuple[str, str]]:
    """The tasks, and how many documents have which status; tasks with equal counts are one row."""
    alike: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for task in report.tasks:
        alike.setdefault(tuple(task.statuses.items()), []).append(task.task)
    for counts, tasks in alike.items():
        of = "" if len(alike) == 1 else f" of {', '.join(tasks)}"
        yield f"status{of}", ", ".join(f"{status} {count:,}" for status, count in counts)


def _answers(report: CorpusReport) -> Iterator[tuple[Grid, Sequence[Chart], int]]:
    """For each task the largest labels, charts of scores, and how many labels have no chart."""
    for task in report.tasks:
        answered = sum(task.labels.values())
        largest = sorted(task.labels.items(), key=lambda each: -each[1])[:SHOWN_GROUPS]
        rows = [(label, f"{count:,}", f"{count / answered:.1%}") for label, count in largest]
        scores = [each for each in report.scores if each.task == task.task]
        charts = histograms(scores)
        drawable = 1 if len(scores) == 2 else len(scores)
        grid = Grid(task.task, ("label", "documents", "share"), rows)
        yield grid, charts, drawable - len(charts)


def _quality(model: str, evaluation: Evaluation, spec_file: str) -> dict[str, Any]:
    """The figures of an evaluation, where they are from, and what they call for."""
    is_ready = all(t.versions and not t.at_chance and not t.swapped for t in evaluation.tasks)
    labelled = [("model", model), ("labelled", evaluation.labelled_at)]
    return {
        "quality": [_task_quality(task, evaluation.gold, spec_file) for task in evaluation.tasks],
        "sources": [*labelled, *sources(evaluation)],
        "filter_command": f"assay filter {shlex.quote(spec_file)} --to FOLDER" if is_ready else "",
        "ranked_labels": RANKED_LABELS,
    }


def _task_quality(task: TaskEvaluation, gold: Gold, spec_file: str) -> dict[str, Any]:
    words = [spec_file, "--gold", gold.source, *gold.options.words(task.task)]
    shown: dict[str, Any] = {
        "of": task,
        "name": task.task,
        "fit": f"assay fit {shlex.join(words)}" if task.at_chance else "",
        "rows": row_counts(task),
        "doubts": list(evaluation_doubts(task, gold)),
        "issues": issue_grid(task, SHOWN_ISSUES, texts=True),
    }
    if task.versions:
        headlines, *grids = score_grids(task)
        shown |= {"headlines": headlines, "grids": [*grids, confusion_grid(task)]}
        shown["charts"] = curves(task)
    return shown


def _subgroups(report: CorpusReport) -> Iterator[tuple[SubgroupReport, Grid]]:
    names = ("subgroup", "negatives", "false positives", "rate", "rate of others")
    for of in report.subgroups:
        rows = [
            (
                each.name,
                f"{each.negatives:,}",
                f"{each.false_positives:,}",
                f"{_percent(each.rate)} ({_percent(each.low)} to {_percent(each.high)})",
                _percent(each.rate_of_others),
                f"{each.p_value:.2g}",
                "higher" if each.flagged else "",
            )
            for each in of.rates
        ]
        title = f"{of.task}: false positives of {of.label}"
        yield of, Grid(title, (*names, "corrected p-value", "flag"), rows)


def _overview(report: CorpusReport) -> list[tuple[str, str]]:
    whole = sum(report.whole, Size())
    pace = ""
    if report.seconds is not None:
        pace = f"{report.docs_per_s:,.1f} documents per second in the last run, "
        pace += f"over {report.seconds:,.0f} s"
    return [
        ("input", report.input),
        ("output", report.output),
        ("snapshot", f"{report.snapshot:08d}, {report.labelled_at}"),
        ("model", report.model),
        ("instruction", truncate(report.instruction, INSTRUCTION_CHARS) if report.model else ""),
        ("size", f"{whole.chars:,} characters; {whole.tokens:,} tokens that the model read"),
        ("speed", pace),
    ]


def _tasks(report: CorpusReport) -> Grid:
    rows = [
        (
            task.task,
            task.question or "",
            task.readout or "",
            task.fingerprint,
            ", ".join(f"{name} {hash[:HASH_CHARS]}" for name, hash in sorted(task.weights.items())),
            ", ".join(f"{name} {version}" for name, version in sorted(task.versions.items())),
        )
        for task in report.tasks
    ]
    names = ("task", "question", "readout", "version of the task", "weights", "packages")
    return Grid("Tasks", names, rows, texts=6)


def show_corpus_report(report: CorpusReport, console: Console) -> None:
    """How much is kept, how good the answers are, what was labelled, and every doubt."""
    rows = [*_main(report), *_statuses(report), *_overview(report)]
    if report.filter is not None:
        rows.append(("rule", report.filter.rule))
    console.print(two_columns([pair for pair in rows if pair[1]]))
    for doubt in report_doubts(report):
        console.print(f"\nwarning: {escape_controls(doubt)}")


def corpus_report_json(report: CorpusReport) -> dict[str, Any]:
    """Every number of the page, and its texts to publish."""
    bare = asdict(replace(report, quality=None, drift=None))
    return bare | {
        "thresholds": THRESHOLDS.tolist(),
        "quality": None if report.quality is None else evaluation_json(report.quality),
        "drift": None if report.drift is None else comparison_json(report.drift),
        "public_summary": public_summary(report),
        "dataset_card": dataset_card(report),
        "warnings": list(report_doubts(report)),
    }
