"""Consoles, the log of a cluster job, and the question after Ctrl-C."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from pipeline.report.console import (
    PIPE_COLUMNS,
    Grid,
    console_on,
    job_log,
    print_parts,
    wants_stop,
)

REPORTS = Path(__file__).parents[2] / "pipeline" / "report"


@pytest.mark.parametrize(
    ("variables", "columns"),
    [
        ({"COLUMNS": ""}, PIPE_COLUMNS),
        ({"COLUMNS": "60"}, 60),
        ({"COLUMNS": "0"}, PIPE_COLUMNS),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, PIPE_COLUMNS),
    ],
    ids=str,
)
def test_without_a_terminal_tables_have_a_width_and_words_stay_whole(
    variables: dict[str, str], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    long = "word " * 100
    grid = Grid("a title of several words", ("label", "text", "n"), [("a", long, "7")], texts=2)
    for part in ({"name": long}, grid):
        shown = io.StringIO()
        print_parts([part], console_on(shown))
        lines = re.sub(r"\x1b\[\d*m", "", shown.getvalue()).splitlines()
        assert len(lines) > 100 * len("word ") / columns and max(map(len, lines)) <= columns
        words = {word for line in lines for word in line.split()}
        assert words - {"─" * len(word) for word in words} <= {
            *("name", "word", "a", "label", "text", "n", "7", *grid.title.split())
        }


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_a_narrow_table_has_every_digit_and_every_name(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    interval, shown = "0.912 (0.884 to 0.935)", io.StringIO()
    cells = [*[interval] * 2, *["0.123"] * 3, "123,456,789", "1,234"]
    names = ["label", "precision", "recall", "F1", "AUROC", "AP", "gold", "predicted"]
    rows = [("toxicity_of_a_text", *cells), ("and more groups",)]
    print_parts([Grid("", names, rows)], console_on(shown))
    words = {word for cell in (*names, *cells) for word in cell.split()}
    assert words <= {*shown.getvalue().split()}
    starts = [line[:18].partition("  ")[0].strip() for line in shown.getvalue().splitlines()[2:]]
    assert "".join(starts).replace(" ", "") == "toxicity_of_a_textandmoregroups"


def test_neither_a_line_nor_a_path_is_broken() -> None:
    path, shown = "/folder" * 40, io.StringIO()
    print_parts([{"at": path, "and": f"in {path}"}, f"next: assay run {path}"], console_on(shown))
    assert shown.getvalue().splitlines() == [
        f"at   {path}",
        "and  in",
        f"     {path}",
        f"next: assay run {path}",
    ]


def test_every_report_is_printed_on_such_a_console() -> None:
    folders = (REPORTS, REPORTS.parent / "cli", REPORTS.parents[1] / "jobs")
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert REPORTS / "console.py" in files
    made = (" Console(", " PipeConsole(")
    owners = [file.name for file in files if any(each in file.read_text("utf-8") for each in made)]
    assert owners == ["console.py"]


LOG = 'one\ntwo {"a": 1}\n{"documents": 3}\n{no json\nlast'


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("results", [True, False])
def test_lines_are_whole_however_they_come_and_a_result_is_apart(size: int, results: bool) -> None:
    out, err = io.StringIO(), io.StringIO()
    log = job_log(out, err, results=results)
    for start in range(0, len(LOG), size):
        log.write(LOG[start : start + size])
    log.close()
    if results:
        assert out.getvalue() == '{"documents": 3}\n'
        assert err.getvalue() == 'one\ntwo {"a": 1}\n{no json\nlast\n'
    else:
        assert out.getvalue() == LOG + "\n" and not err.getvalue()


class Terminal(io.StringIO):
    """A keyboard; what is typed is there already."""

    def isatty(self) -> bool:
        return True


class Impatient(Terminal):
    def readline(self, *_: object) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("answers", "stops"),
    [
        (Terminal("y\n"), True),
        (Terminal(" Yes\n"), True),
        (Terminal("\n"), False),
        (Terminal("n\n"), False),
        (Terminal(""), False),
        (Impatient(), False),
        (io.StringIO("y\n"), False),  # no terminal: no question was asked
    ],
)
def test_a_job_is_stopped_only_if_the_user_confirms_it(answers: io.StringIO, stops: bool) -> None:
    asked = io.StringIO()
    assert wants_stop("job-1", asked, answers) is stops
    assert ("Stop job-1" in asked.getvalue()) is answers.isatty()
