"""An evaluation as one HTML page without scripts, fonts or requests. Entry point: `write_page`.

Every text may be hostile, so `_table` and `_safe` escape it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from pipeline.errors import StorageError
from pipeline.evaluation.metrics import RANKED_LABELS
from pipeline.report.console import Grid, escape_controls
from pipeline.report.doubts import evaluation_doubt
from pipeline.report.evaluation_plots import plots
from pipeline.report.evaluation_table import issue_grid, number, row_counts, score_grids, sources
from pipeline.verbs.evaluate import Evaluation, TaskEvaluation

SHOWN_ISSUES = 100
_NOTE = (
    "The intervals are from bootstrap resamples. Macro F1 is the mean over the labels that occur. "
    "With two labels, AUROC and average precision are those of the first label; with more, they "
    f"are the mean of each label against the rest. Above {RANKED_LABELS} labels they have no "
    "interval. The calibration error is that of the answer's p."
)
# The browser fetches nothing and runs no script, whatever a label or a text contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1200px; margin: 2em auto;
       padding: 0 1em; }
h2 { border-top: 2px solid #ccc; padding-top: 1em; margin-top: 2em; }
table { border-collapse: collapse; margin: .5em 0 1.5em; }
th, td { padding: .25em .8em; border-bottom: 1px solid #ddd; text-align: left;
         vertical-align: top; overflow-wrap: anywhere; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: 1em 0 2em; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; }
.failed { color: #a00; font-weight: bold; }
"""


def write_page(evaluation: Evaluation, path: Path) -> None:
    """Writes the page, and replaces a file at `path`. StorageError if it cannot be written."""
    try:
        path.write_text(page(evaluation), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"--html: {path}: cannot be written: {error}") from error


def page(evaluation: Evaluation) -> str:
    """The page's HTML."""
    title = f"{evaluation.spec}: answers against gold"
    gates = [
        (decision.gate, "passed" if decision.passed else "FAILED", number(decision.value))
        for decision in evaluation.decisions
    ]
    return "".join(
        [
            "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{_safe(title)}</title><style>{_CSS}</style></head><body>",
            f"<h1>{_safe(title)}</h1>",
            _table(Grid("", (), list(sources(evaluation)), texts=2)),
            _table(Grid("", ("gate", "", "value"), gates, texts=2)) if gates else "",
            *(part for task in evaluation.tasks for part in _task(task)),
            "</body></html>\n",
        ]
    )


def _task(task: TaskEvaluation) -> Iterator[str]:
    yield f"<h2>{_safe(task.task)}</h2><p>{_safe(row_counts(task))}</p>"
    if not task.versions:
        return
    if doubt := evaluation_doubt(task):
        yield f"<p><strong>{_safe(doubt)}</strong></p>"
    headlines, *others = score_grids(task)
    yield _table(headlines) + f"<p>{_safe(_NOTE)}</p>"
    for title, svg in plots(task):
        yield f"<figure><figcaption>{_safe(title)}</figcaption>{svg}</figure>"
    yield from map(_table, others)
    if task.label_issues:
        yield _table(issue_grid(task, SHOWN_ISSUES, texts=True))


def _table(grid: Grid) -> str:
    """A table. It alone escapes the cells."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = ("" if index < grid.texts else " class='n'" for index in range(len(cells)))
        shown = (
            f"<{tag}{kind}>{_safe(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)
        )
        return f"<tr>{''.join(shown)}</tr>"

    title = f"<h3>{_safe(grid.title)}</h3>" if grid.title else ""
    head = f"<thead>{line(grid.names, 'th')}</thead>" if grid.names else ""
    body = "".join(line(row, "td") for row in grid.rows)
    return f"{title}<table>{head}<tbody>{body}</tbody></table>"


def _safe(text: str) -> str:
    return escape(escape_controls(text), quote=True)
