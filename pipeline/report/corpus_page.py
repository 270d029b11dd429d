"""A report of an output, for people: one HTML page, a summary, JSON. Entry point: `write_report`.

The page fetches nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from pipeline.filters.dry_run import Size
from pipeline.filters.tally import BORDERLINE, DROPPED, KEPT, SURE, THRESHOLDS
from pipeline.report.console import Grid, escape_controls, truncate, two_columns
from pipeline.report.disclosure import dataset_card, filter_text, public_summary
from pipeline.report.doubts import report_doubts
from pipeline.report.drift import comparison_json, drift_line, task_grid
from pipeline.report.evaluation_table import evaluation_json, headline
from pipeline.report.page import bullets, document, facts, safe, table, write
from pipeline.report.thresholds import SCRIPT, histograms, slider
from pipeline.stores.named_files import Target
from pipeline.verbs.corpus_report import CorpusReport, Pairs

SHOWN_GROUPS = 20
ID_CHARS = 80
INSTRUCTION_CHARS = 400
HASH_CHARS = 12
_VERDICT = ("corrected p-value", "flag")
_STYLE = """
nav ul { display: flex; flex-wrap: wrap; gap: .25em 1.5em; list-style: none; padding: 0; }
pre { white-space: pre-wrap; background: #f5f5f5; padding: 1em; }
figure { margin: 0; width: 340px; max-width: 100%; }
figure svg { width: 100%; height: auto; }
.figures { display: flex; flex-wrap: wrap; gap: 1.5em; }
.text { margin: .25em 0 1em; padding: .5em; background: #f5f5f5; overflow-wrap: anywhere; }
.controls { display: flex; flex-wrap: wrap; gap: .5em 1.5em; align-items: center; }
input[type=range] { width: 300px; max-width: 100%; }
main:not(:has(#show-texts:checked)) .text:not(:focus) { filter: blur(6px); }
.text img { display: block; max-width: 100%; }
:focus-visible { outline: 3px solid #1f5fa8; outline-offset: 2px; }
@media print { .controls { display: none; } }
"""
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


def write_report(report: CorpusReport, target: Target, *, spec_file: str) -> None:
    """Writes the page, and replaces a file that exists. StorageError if it cannot be written."""
    written_at = datetime.now(UTC)
    html = page(report, spec_file=spec_file, folder=os.getcwd(), written_at=written_at)
    write(html, target)


def page(report: CorpusReport, *, spec_file: str, folder: str, written_at: datetime) -> str:
    """The page's HTML; local paths are relative to the folder of the spec, a path in `folder`."""
    shown = _with_near_paths(report, os.path.dirname(os.path.join(folder, spec_file)))
    sections: dict[str, Iterable[str]] = {
        "summary": _summary(shown),
        "reasons": _reasons(shown),
        "examples": _examples(shown),
        "thresholds": slider(shown.scores) if shown.scores else (),
        "groups": _groups(shown),
        "answers": _answers(shown),
        "quality": _quality(shown, spec_file),
        "subgroups": _subgroups(shown),
        "drift": _drift(shown),
        "disclosure": _disclosure(shown),
        "provenance": _provenance(shown, spec_file, written_at),
    }
    html = {name: "".join(parts) for name, parts in sections.items()}
    html = {name: text for name, text in html.items() if text}
    links = bullets(f"<a href='#{name}'>{safe(_SECTIONS[name])}</a>" for name in html)
    parts = [
        f"<nav aria-label='Sections'>{links}</nav>",
        *(f"<h2 id='{name}'>{safe(_SECTIONS[name])}</h2>{text}" for name, text in html.items()),
    ]
    script = SCRIPT if report.scores else ""
    return document(f"{report.spec}: report", parts, style=_STYLE, script=script)


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


def _summary(report: CorpusReport) -> Iterator[str]:
    """What the reader came for: how much is kept, how good the answers are, and every doubt."""
    yield bullets(f"<strong>{safe(name)}</strong>: {safe(value)}" for name, value in _main(report))
    doubts = [safe(each) for each in report_doubts(report)]
    if doubts:
        yield f"<h3>Doubts</h3>{bullets(doubts)}"
    if report.quality is None:
        yield "<p>There are no gold labels: <code>--gold FILE</code>. "
        yield "<code>assay audit</code> draws a sample for people to label.</p>"


def _main(report: CorpusReport) -> Iterator[tuple[str, str]]:
    """Documents, what the filter does to them, and the main figures of each task."""
    whole = _sum(report.whole)
    partial = " (the snapshot leaves out documents of the input)" if report.partial else ""
    yield "documents", f"{whole.documents:,}{partial}"
    yield "filter", filter_text(report) if report.filter else "The spec has no filter."
    if report.quality is not None:
        for task in report.quality.tasks:
            yield task.task, headline(task, report.quality.gold)


def _reasons(report: CorpusReport) -> Iterator[str]:
    if report.filter is None:
        return
    yield f"<p>Rule: <code>{safe(report.filter.rule)}</code>. "
    yield f"Documents without an answer: on_error is {safe(report.filter.on_error)}.</p>"
    documents = max(1, _sum(report.whole).documents)
    reasons = [
        (reason, f"{count:,}", f"{count / documents:.1%}")
        for reason, count in report.filter.reasons.items()
    ]
    if reasons:
        yield table(Grid("", ("condition", "documents", "share of all documents"), reasons))
    if report.filter.several:
        yield f"<p>{report.filter.several:,} documents break more than one condition; each of "
        yield "their conditions counts them.</p>"


def _provenance(report: CorpusReport, spec_file: str, written_at: datetime) -> Iterator[str]:
    written = ("this page", written_at.isoformat(timespec="seconds"))
    yield facts([("spec", f"{spec_file}, job {report.spec}"), *_overview(report), written])
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
    yield table(Grid("Tasks", names, rows, texts=6))


def _overview(report: CorpusReport) -> list[tuple[str, str]]:
    whole = _sum(report.whole)
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


def _statuses(report: CorpusReport) -> Iterator[tuple[str, str]]:
    """The tasks, and how many documents have which status; tasks with equal counts are one row."""
    alike: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for task in report.tasks:
        alike.setdefault(tuple(task.statuses.items()), []).append(task.task)
    for counts, tasks in alike.items():
        of = "" if len(alike) == 1 else f" of {', '.join(tasks)}"
        yield f"status{of}", ", ".join(f"{status} {count:,}" for status, count in counts)


def _sum(pair: tuple[Size, Size]) -> Size:
    kept, dropped = (asdict(each) for each in pair)
    return Size(**{name: kept[name] + dropped[name] for name in kept})


def _answers(report: CorpusReport) -> Iterator[str]:
    yield facts(_statuses(report))
    for task in report.tasks:
        answered = sum(task.labels.values())
        largest = sorted(task.labels.items(), key=lambda each: -each[1])[:SHOWN_GROUPS]
        rows = [(label, f"{count:,}", f"{count / answered:.1%}") for label, count in largest]
        yield table(Grid(task.task, ("label", "documents", "share"), rows))
        yield histograms([each for each in report.scores if each.task == task.task])


def _groups(report: CorpusReport) -> Iterator[str]:
    if report.by:
        yield _sizes(f"By {report.by}", report.groups)
    yield _sizes("By length", report.lengths)
    yield _sizes("By file", report.files)


def _sizes(title: str, pairs: Pairs) -> str:
    rows: list[tuple[str, ...]] = []
    for name, pair in list(pairs.items())[:SHOWN_GROUPS]:
        (kept, dropped), whole = pair, _sum(pair)
        share = f"{dropped.documents / max(1, whole.documents):.1%}"
        of_each = (f"{kept.documents:,}", f"{dropped.documents:,}", share)
        rows.append((name, *of_each, f"{whole.chars:,}", f"{whole.tokens:,}"))
    if len(pairs) > SHOWN_GROUPS:
        rows.append((f"{len(pairs) - SHOWN_GROUPS:,} more; --json has them all", *[""] * 5))
    names = ("", "kept", "dropped", "share dropped", "characters", "tokens")
    return table(Grid(title, names, rows))


def _examples(report: CorpusReport) -> Iterator[str]:
    if not report.examples:
        return
    yield (
        "<p>Texts are blurred, because they may offend. Go to a text to read it, or show all.</p>"
        "<p class='controls'><label><input type='checkbox' id='show-texts'> Show all texts</label>"
        "</p>"
    )
    heading = ""
    for each in report.examples:
        of = each.example
        title = {
            KEPT: "Kept by the filter" if report.filter else "Any documents",
            DROPPED: "Dropped by the filter",
            SURE: f"{of.task}: {of.label}, sure",
            BORDERLINE: f"{of.task}: {of.label}, borderline",
        }[of.kind]
        if title != heading:
            yield f"<h3>{safe(title)}</h3>"
            heading = title
        margin = "" if of.margin is None else f", margin {of.margin:.3f}"
        reason = f", dropped: {of.reason}" if of.reason else ""
        yield f"<p>{safe(truncate(of.doc_id, ID_CHARS))}{safe(margin + reason)}</p>"
        picture = ""
        if each.picture is not None:
            picture = (
                f"<img alt='image of the document' src='data:image/png;base64,{each.picture}'>"
            )
        words = safe(each.text or ("" if picture else "(no text)"))
        yield f"<div class='text' tabindex='0'>{picture}{words}</div>"


def _quality(report: CorpusReport, spec_file: str) -> Iterator[str]:
    if report.quality is None:
        return
    from pipeline.report.evaluation_section import evaluation_section  # needs matplotlib

    yield from evaluation_section(report.quality, spec_file)


def _subgroups(report: CorpusReport) -> Iterator[str]:
    for of in report.subgroups:
        flagged = [each for each in of.rates if each.flagged]
        yield bullets(
            f"<strong>{safe(each.name)}</strong>: false positive rate {_percent(each.rate)}; "
            f"{_percent(each.rate_of_others)} for all other documents"
            for each in flagged
        )
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
        names = ("subgroup", "negatives", "false positives", "rate", "rate of others", *_VERDICT)
        yield table(Grid(f"{of.task}: false positives of {of.label}", names, rows))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _drift(report: CorpusReport) -> Iterator[str]:
    if report.drift is None:
        return
    yield f"<p>Before: snapshot {safe(report.drift.before)}.</p>"
    for task in report.drift.tasks:
        yield table(task_grid(task))
        yield f"<p>{safe(drift_line(task))}</p>"


def _disclosure(report: CorpusReport) -> Iterator[str]:
    yield "<h3>For the public summary of training content</h3>"
    yield f"<pre>{'<br>'.join(map(safe, public_summary(report).splitlines()))}</pre>"
    yield "<h3>Dataset card, in Markdown</h3>"
    yield f"<pre>{'<br>'.join(map(safe, dataset_card(report).splitlines()))}</pre>"


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
