"""A report of an output, for people: one HTML page, a summary, JSON. Entry point: `write_report`.

The page fetches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from pipeline.filters.dry_run import Size
from pipeline.filters.tally import BORDERLINE, DROPPED, KEPT, SURE, THRESHOLDS
from pipeline.report.console import Grid, truncate, two_columns
from pipeline.report.disclosure import dataset_card, filter_text, public_summary
from pipeline.report.drift import comparison_json, drift_line, task_grid
from pipeline.report.evaluation_table import evaluation_json
from pipeline.report.page import bullets, document, facts, safe, table, write
from pipeline.report.thresholds import SCRIPT, histogram, slider
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
figure svg { width: 100%; height: 120px; background: #f5f5f5; }
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
    "labelled": "What was labelled",
    "answers": "Answers",
    "filter": "What the filter does",
    "thresholds": "Thresholds",
    "quality": "Quality",
    "subgroups": "False positives by subgroup",
    "drift": "Changes since the snapshot before",
    "examples": "Examples",
    "disclosure": "Texts to publish",
}


def write_report(report: CorpusReport, target: Target, *, spec_file: str) -> None:
    """Writes the page, and replaces a file that exists. StorageError if it cannot be written."""
    write(page(report, spec_file=spec_file, written_at=datetime.now(UTC)), target)


def page(report: CorpusReport, *, spec_file: str, written_at: datetime) -> str:
    """The page's HTML."""
    sections: dict[str, Iterable[str]] = {
        "labelled": _labelled(report, spec_file, written_at),
        "answers": _answers(report),
        "filter": _filter(report),
        "thresholds": slider(report.scores) if report.scores else (),
        "quality": _quality(report, spec_file),
        "subgroups": _subgroups(report),
        "drift": _drift(report),
        "examples": _examples(report),
        "disclosure": _disclosure(report),
    }
    shown = {name: "".join(parts) for name, parts in sections.items()}
    shown = {name: html for name, html in shown.items() if html}
    links = bullets(f"<a href='#{name}'>{safe(_SECTIONS[name])}</a>" for name in shown)
    parts = [
        f"<nav aria-label='Sections'>{links}</nav>",
        *(f"<h2 id='{name}'>{safe(_SECTIONS[name])}</h2>{html}" for name, html in shown.items()),
    ]
    script = SCRIPT if report.scores else ""
    return document(f"{report.spec}: report", parts, style=_STYLE, script=script)


def _labelled(report: CorpusReport, spec_file: str, written_at: datetime) -> Iterator[str]:
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
        pace = f"{report.docs_per_s:,.1f} documents per second, over {report.seconds:,.0f} s"
    partial = " (it leaves out documents of the input)" if report.partial else ""
    return [
        ("input", report.input),
        ("output", report.output),
        ("snapshot", f"{report.snapshot:08d}, {report.labelled_at}{partial}"),
        ("model", report.model),
        ("instruction", truncate(report.instruction, INSTRUCTION_CHARS) if report.model else ""),
        ("documents", f"{whole.documents:,}; status after reading: {_statuses(report.statuses)}"),
        ("size", f"{whole.chars:,} characters; {whole.tokens:,} tokens that the model read"),
        ("speed", pace),
    ]


def _statuses(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{status} {count:,}" for status, count in counts.items())


def _sum(pair: tuple[Size, Size]) -> Size:
    kept, dropped = (asdict(each) for each in pair)
    return Size(**{name: kept[name] + dropped[name] for name in kept})


def _answers(report: CorpusReport) -> Iterator[str]:
    for task in report.tasks:
        answered = sum(task.labels.values())
        largest = sorted(task.labels.items(), key=lambda each: -each[1])[:SHOWN_GROUPS]
        rows = [(label, f"{count:,}", f"{count / answered:.1%}") for label, count in largest]
        yield table(Grid(task.task, ("label", "documents", "share"), rows))
        yield f"<p>Statuses: {safe(_statuses(task.statuses))}</p>"
        charts = [histogram(each) for each in report.scores if each.task == task.task]
        # — of two labels the second mirrors the first
        yield f"<div class='figures'>{''.join(charts[:1] if len(charts) == 2 else charts)}</div>"


def _filter(report: CorpusReport) -> Iterator[str]:
    if report.filter is None:
        yield "<p>The spec has no filter.</p>"
    else:
        yield f"<p>Rule: <code>{safe(report.filter.rule)}</code>. {safe(filter_text(report))}</p>"
        on_error = f"Documents without an answer: on_error is {report.filter.on_error}."
        yield f"<p>{safe(on_error)}</p>"
        reasons = [(reason, f"{count:,}") for reason, count in report.filter.reasons.items()]
        if reasons:
            yield table(Grid("Why documents are dropped", ("reason", "documents"), reasons))
    yield _sizes("By length", report.lengths)
    if report.by:
        yield _sizes(f"By {report.by}", report.groups)
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
        yield "<p>There are no gold labels: <code>--gold FILE</code>. "
        yield "<code>assay audit</code> draws a sample for people to label.</p>"
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
    """What was labelled, what the filter drops, and the doubts."""
    rows = [pair for pair in _overview(report) if pair[1]]
    if report.filter is not None:
        rows.append(("filter", f"{report.filter.rule}: {filter_text(report)}"))
    rows += [
        ("subgroup", f"{each.name}: false positive rate of {of.label} {_percent(each.rate)}")
        for of in report.subgroups
        for each in of.rates
        if each.flagged
    ]
    console.print(two_columns(rows))


def corpus_report_json(report: CorpusReport) -> dict[str, Any]:
    """Every number of the page, and its texts to publish."""
    bare = asdict(replace(report, quality=None, drift=None))
    return bare | {
        "thresholds": THRESHOLDS.tolist(),
        "quality": None if report.quality is None else evaluation_json(report.quality),
        "drift": None if report.drift is None else comparison_json(report.drift),
        "public_summary": public_summary(report),
        "dataset_card": dataset_card(report),
    }
