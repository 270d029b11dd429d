"""HTML pages in one file, without requests. Entry points: `page_target`, `document` and `table`.

Every text may be hostile, so `table` and `safe` escape it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import Problem, SpecError
from pipeline.report.console import Grid, escape_controls
from pipeline.stores.named_files import Target, open_target

_LONG_CHARS = 60  # a longer cell is shown on several lines
# The browser fetches nothing and runs no script but the page's own, whatever a text contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
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
code, pre { overflow-wrap: anywhere; white-space: pre-wrap; }
.plots { display: flex; flex-wrap: wrap; gap: 1em; margin-bottom: 2em; }
.plots div { max-width: 100%; overflow-x: auto; }
.plots svg { max-width: 100%; height: auto; }
.plots.wide svg { max-width: none; }
"""


def document(title: str, parts: Iterable[str], *, style: str = "", script: str = "") -> str:
    """A whole page of parts that are HTML."""
    policy, run = _POLICY, ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy, run = f"{policy}; script-src 'sha256-{digest}'", f"<script>{script}</script>"
    return "".join(
        [
            "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>",
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{safe(title)}</title><style>{_CSS}{style}</style></head><body><main>",
            f"<h1>{safe(title)}</h1>",
            *parts,
            f"</main>{run}</body></html>\n",
        ]
    )


def page_target(url: str, options: Mapping[str, Any], *, flag: str, plots: bool) -> Target:
    """The file for a page, at a path or any fsspec URL; `plots`: the page has plots of gold labels.

    Raises:
        SpecError: The URL is a folder or cannot be opened, or the plots need a missing package.
    """
    if plots and find_spec("matplotlib") is None:
        fix = "the plots of the page need matplotlib: pip install 'corpus-assay[plots]'"
        raise SpecError([Problem(flag, fix, url)])
    target = open_target(url, options, flag=flag)
    is_local = isinstance(target.file_system, LocalFileSystem)
    if url.endswith("/") or (is_local and Path(target.place).is_dir()):
        raise SpecError([Problem(flag, "is a folder; name a file", url)])
    return target


def write(html: str, target: Target) -> None:
    """Replaces the file in one step. StorageError if it cannot be written."""
    with target.replaced() as path:
        path.write_text(html, encoding="utf-8")


def bullets(items: Iterable[str]) -> str:
    """A list of items that are HTML."""
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values; pairs without a value are left out."""
    shown = (f"<dt>{safe(name)}</dt><dd>{safe(value)}</dd>" for name, value in pairs if value)
    return f"<dl>{''.join(shown)}</dl>"


def table(grid: Grid, *, level: int = 3) -> str:
    """A table below a heading of this level. It alone escapes the cells."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = (_kind(cell, is_text=index < grid.texts) for index, cell in enumerate(cells))
        tags = (tag if cell else "td" for cell in cells)  # — a heading is never empty
        shown = (
            f"<{tag}{kind}>{safe(cell)}</{tag}>"
            for tag, kind, cell in zip(tags, kinds, cells, strict=True)
        )
        return f"<tr>{''.join(shown)}</tr>"

    title = f"<h{level}>{safe(grid.title)}</h{level}>" if grid.title else ""
    head = f"<thead>{line(grid.names, 'th')}</thead>" if grid.names else ""
    body = "".join(line(row, "td") for row in grid.rows)
    # — what is scrolled needs the focus of a keyboard
    return (
        f"{title}<div class='scroll' tabindex='0'><table>{head}<tbody>{body}</tbody></table></div>"
    )


def _kind(cell: str, *, is_text: bool) -> str:
    """The class of a cell: a number, a text that needs several lines, or neither."""
    if not is_text:
        return " class='n'"
    return " class='long'" if len(cell) > _LONG_CHARS else ""


def safe(text: str) -> str:
    """The text as HTML, without control characters."""
    return escape(escape_controls(text), quote=True)
