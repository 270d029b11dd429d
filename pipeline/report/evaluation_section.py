"""An evaluation as one HTML page without scripts, fonts or requests. Entry point: `write_page`.

Every text may be hostile, so `_table` and `_safe` escape it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from html import escape
from pathlib import Path

from pipeline.errors import StorageError
from pipeline.evaluation.metrics import RANKED_LABELS
from pipeline.report.console import Grid, escape_controls
from pipeline.report.doubts import evaluation_doubt
from pipeline.report.evaluation_plots import plots
from pipeline.report.evaluation_table import (
    interval,
    issue_grid,
    number,
    row_counts,
    score_grids,
    sources,
)
from pipeline.verbs.evaluate import Evaluation, TaskEvaluation

SHOWN_ISSUES = 100
_LONG_CHARS = 60  # a longer cell is shown on several lines
_NOTE = (
    "The intervals are from bootstrap resamples. Macro F1 is the mean over the labels that occur. "
    "With two labels, AUROC and average precision are those of the first label; with more, they "
    f"are the mean of each label against the rest. Above {RANKED_LABELS} labels they have no "
    "interval. The calibration error is that of the answer's p."
)
# The browser fetches nothing and runs no script, whatever a label or a text contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# Words are broken only where a path or a hash would not fit; a table that is too wide is scrolled.
_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1200px; margin: 2em auto;
       padding: 0 1em; }
h1 { line-height: 1.2; }
h2 { border-top: 2px solid #ccc; padding-top: 1em; margin-top: 2em; }
.scroll { overflow-x: auto; margin: .5em 0 1.5em; }
table { border-collapse: collapse; }
th, td { padding: .25em .8em .25em 0; border-bottom: 1px solid #ddd; text-align: left;
         vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.long { min-width: 18em; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25em 1em; }
dt { color: #666; }
dd { margin: 0; overflow-wrap: anywhere; }
code { overflow-wrap: anywhere; }
.plots { display: flex; flex-wrap: wrap; gap: 1em; margin-bottom: 2em; }
.plots div { max-width: 100%; overflow-x: auto; }
.plots svg { max-width: 100%; height: auto; }
.plots.wide svg { max-width: none; }
"""


def write_page(evaluation: Evaluation, path: Path, *, spec_file: str, written_at: datetime) -> None:
    """Writes the page, and replaces a file at `path`. StorageError if it cannot be written."""
    try:
        path.write_text(
            page(evaluation, spec_file=spec_file, written_at=written_at), encoding="utf-8"
        )
    except OSError as error:
        raise StorageError(f"--html: {path}: cannot be written: {error}") from error


def page(evaluation: Evaluation, *, spec_file: str, written_at: datetime) -> str:
    """The page's HTML: the headline, what to do next, where the figures are from, each task."""
    title = f"{evaluation.spec}: answers against gold"
    gates = [
        (decision.gate, "passed" if decision.passed else "FAILED", number(decision.value))
        for decision in evaluation.decisions
    ]
    facts = [
        ("spec", f"{spec_file}, job {evaluation.spec}"),
        ("model", evaluation.model),
        ("labelled", evaluation.labelled_at),
        ("this page", written_at.isoformat(timespec="seconds")),
        *sources(evaluation),
    ]
    return "".join(
        [
            "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{_safe(title)}</title><style>{_CSS}</style></head><body>",
            f"<h1>{_safe(title)}</h1>",
            _list(_headline(task) for task in evaluation.tasks),
            "<h3>What to do next</h3>",
            _list(_next_steps(evaluation, spec_file)),
            _table(Grid("", ("gate", "", "value"), gates, texts=2)) if gates else "",
            "<h3>Where the figures are from</h3><dl>",
            *(f"<dt>{_safe(name)}</dt><dd>{_safe(value)}</dd>" for name, value in facts if value),
            "</dl>",
            *(part for task in evaluation.tasks for part in _task(task)),
            "</body></html>\n",
        ]
    )


def _headline(task: TaskEvaluation) -> str:
    if not task.versions:
        return f"{_safe(task.task)}: no gold document has an answer"
    headlines = next(iter(task.versions.values())).scores.headlines
    figures = [f"accuracy {interval(headlines['accuracy'])}"]
    if headlines["auroc"].value is not None:
        figures.insert(0, f"AUROC {interval(headlines['auroc'])}")
    doubt = "; it may be no better than chance" if task.at_chance else ""
    shown = ", ".join([*figures, f"on {task.rows.evaluated:,} documents{doubt}"])
    return f"<strong>{_safe(task.task)}</strong>: {_safe(shown)}"


def _next_steps(evaluation: Evaluation, spec_file: str) -> Iterator[str]:
    """What the figures call for, with the command that does it."""
    spec, gold = shlex.quote(spec_file), evaluation.gold
    for task in evaluation.tasks:
        name = _safe(task.task)
        if task.at_chance:
            words = shlex.join(["--gold", gold.source, *gold.options.words(task.task)])
            fit = f"assay fit {spec} {words}"
            yield f"{name}: train a readout: <code>{_safe(fit)}</code>"
        if task.label_issues:
            yield f"{name}: read the {len(task.label_issues):,} gold labels that may be wrong"
    if not evaluation.passed:
        yield "a gate failed: do not publish these answers before you know why"
    elif not any(task.at_chance for task in evaluation.tasks):
        command = f"<code>{_safe(f'assay filter {spec} --to FOLDER')}</code>"
        if evaluation.rule is None:
            yield f"write a rule as <code>filter.keep</code> in the spec, then run {command}"
        else:
            rule = f"<code>{_safe(evaluation.rule)}</code>"
            yield f"write the documents that the spec's rule, {rule}, keeps: {command}"


def _list(items: Iterable[str]) -> str:
    """A list of items that are HTML."""
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _task(task: TaskEvaluation) -> Iterator[str]:
    yield f"<h2>{_safe(task.task)}</h2><p>{_safe(row_counts(task))}</p>"
    if not task.versions:
        return
    if doubt := evaluation_doubt(task):
        yield f"<p><strong>{_safe(doubt)}</strong></p>"
    headlines, *others = score_grids(task)
    yield _table(headlines) + f"<p>{_safe(_NOTE)}</p>"
    for each in plots(task):
        kind = "plots wide" if each.wide else "plots"
        charts = "".join(f"<div>{svg}</div>" for svg in each.svgs)
        yield f"<h3>{_safe(each.title)}</h3><div class='{kind}'>{charts}</div>"
    yield from map(_table, others)
    if task.label_issues:
        yield _table(issue_grid(task, SHOWN_ISSUES, texts=True))


def _table(grid: Grid) -> str:
    """A table. It alone escapes the cells."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = (_kind(cell, is_text=index < grid.texts) for index, cell in enumerate(cells))
        shown = (
            f"<{tag}{kind}>{_safe(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)
        )
        return f"<tr>{''.join(shown)}</tr>"

    title = f"<h3>{_safe(grid.title)}</h3>" if grid.title else ""
    head = f"<thead>{line(grid.names, 'th')}</thead>" if grid.names else ""
    body = "".join(line(row, "td") for row in grid.rows)
    return f"{title}<div class='scroll'><table>{head}<tbody>{body}</tbody></table></div>"


def _kind(cell: str, *, is_text: bool) -> str:
    """The class of a cell: a number, a text that needs several lines, or neither."""
    if not is_text:
        return " class='n'"
    return " class='long'" if len(cell) > _LONG_CHARS else ""


def _safe(text: str) -> str:
    return escape(escape_controls(text), quote=True)
