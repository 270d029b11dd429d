"""Consoles, the log of a cluster job, and the question after Ctrl-C."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from pipeline.report.console import JobLog, console_on, print_parts, wants_stop

REPORTS = Path(__file__).parents[2] / "pipeline" / "report"


@pytest.mark.parametrize(
    "variables",
    [{"COLUMNS": ""}, {"COLUMNS": "40"}, {"FORCE_COLOR": "1", "TERM": "dumb"}],
    ids=str,
)
def test_output_that_is_no_terminal_is_not_folded(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shown = io.StringIO()
    long = "word " * 100
    print_parts([{"name": long.strip()}, long], console_on(shown))
    assert [line.split() for line in shown.getvalue().splitlines()] == [
        ["name", *["word"] * 100],
        ["word"] * 100,
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
    log = JobLog(out, err, results=results)
    for start in range(0, len(LOG), size):
        log.show(LOG[start : start + size])
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
        (io.StringIO("y\n"), False),  # no terminal: nobody was asked
    ],
)
def test_a_job_is_stopped_only_where_somebody_says_so(answers: io.StringIO, stops: bool) -> None:
    asked = io.StringIO()
    assert wants_stop("job-1", asked, answers) is stops
    assert ("Stop job-1" in asked.getvalue()) is answers.isatty()
