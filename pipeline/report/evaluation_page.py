"""An evaluation as one HTML page without scripts, fonts or requests. Entry point: `write_page`.

Every text may be hostile, so `_table` and `_safe` escape it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from pipeline.errors import StorageError
from pipeline.evaluation.metrics import BINS, HEADLINES, RANKED_LABELS
from pipeline.report.console import escape_controls, truncate
from pipeline.report.evaluation_plots import plots
from pipeline.report.evaluation_table import (
    NAMES,
    interval,
    number,
    row_counts,
    sources,
    threshold,
    warning,
)
from pipeline.verbs.evaluate import Evaluation, TaskEvaluation, VersionScores

SHOWN_ISSUES = 100
_TEXT_CHARS = 400
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
    return "".join(
        [
            "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{_safe(title)}</title><style>{_CSS}</style></head><body>",
            f"<h1>{_safe(title)}</h1>",
            _table((), sources(evaluation)),
            _gates(evaluation),
            *(part for task in evaluation.tasks for part in _task(task)),
            "</body></html>\n",
        ]
    )


def _gates(evaluation: Evaluation) -> str:
    rows = [
        (decision.gate, number(decision.value), "passed" if decision.passed else "FAILED")
        for decision in evaluation.decisions
    ]
    return _table(("gate", "value", ""), rows) if rows else ""


def _task(task: TaskEvaluation) -> Iterator[str]:
    yield f"<h2>{_safe(task.task)}</h2><p>{_safe(row_counts(task.rows) + warning(task))}</p>"
    if not task.versions:
        return
    yield _headlines(task)
    for title, svg in plots(task):
        yield f"<figure><figcaption>{_safe(title)}</figcaption>{svg}</figure>"
    for name, version in task.versions.items():
        which = f" ({name})" if len(task.versions) > 1 else ""
        yield f"<h3>By label{which}</h3>{_labels(version)}"
        if version.cuts:
            yield f"<h3>Thresholds{which}</h3>{_cuts(version)}"
    if task.label_issues:
        yield _label_issues(task)


def _headlines(task: TaskEvaluation) -> str:
    scores = [version.scores for version in task.versions.values()]
    rows = [(NAMES[n], *(interval(each.headlines[n]) for each in scores)) for n in HEADLINES]
    note = (
        f"In brackets: 95 % intervals of {scores[0].resamples:,} bootstrap resamples. Macro F1 is "
        f"the mean over the labels that occur. With two labels, AUROC and average precision are "
        f"those of the first label; with more, they are the mean of each label against the rest. "
        f"Above {RANKED_LABELS} labels they have no interval. The calibration error is that of the "
        f"answer's p, in {BINS} bins of equal mass."
    )
    return _table(("", *task.versions), rows, numbers_from=1) + f"<p>{_safe(note)}</p>"


def _labels(version: VersionScores) -> str:
    rows = [
        (
            each.label,
            *map(number, (each.precision, each.recall, each.f1, each.auroc, each.ap)),
            f"{each.support:,}",
            f"{each.predicted:,}",
        )
        for each in version.scores.labels
    ]
    names = ("label", "precision", "recall", "F1", "AUROC", "AP", "gold", "predicted")
    return _table(names, rows, numbers_from=1)


def _cuts(version: VersionScores) -> str:
    rows = []
    for cut in version.cuts:
        at, minimum = cut.threshold, f"{cut.metric} {cut.least:g}"
        if at is None:
            rows.append((minimum, cut.label, "no threshold has it", "", "", ""))
            continue
        figures = (
            threshold(at.threshold),
            number(at.precision),
            number(at.recall),
            f"{at.flagged:,}",
        )
        rows.append((minimum, cut.label, *figures))
    names = ("minimum", "label", "p at least", "precision", "recall", "documents")
    return _table(names, rows, numbers_from=2)


def _label_issues(task: TaskEvaluation) -> str:
    shown = task.label_issues[:SHOWN_ISSUES]
    texts = any(each.text is not None for each in shown)
    rows = []
    for each in shown:
        row = (each.doc_id, each.gold, each.likely, number(each.p_gold), number(each.p_likely))
        rows.append((*row, truncate(each.text or "", _TEXT_CHARS)) if texts else row)
    names = ("document", "gold", "answer", "p of gold", "p of answer")
    more = len(task.label_issues) - len(shown)
    left = f"<p>{more:,} more are in the JSON form.</p>" if more else ""
    return (
        "<h3>Gold labels that are probably wrong, the most probable first</h3>"
        + _table((*names, "text") if texts else names, rows)
        + left
    )


def _table(
    names: Sequence[str], rows: Iterable[Sequence[str]], *, numbers_from: int | None = None
) -> str:
    """A table. It alone escapes the cells."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = (
            " class='n'" if numbers_from is not None and index >= numbers_from else ""
            for index in range(len(cells))
        )
        shown = (
            f"<{tag}{kind}>{_safe(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)
        )
        return f"<tr>{''.join(shown)}</tr>"

    head = f"<thead>{line(names, 'th')}</thead>" if names else ""
    return f"<table>{head}<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"


def _safe(text: str) -> str:
    return escape(escape_controls(text), quote=True)
