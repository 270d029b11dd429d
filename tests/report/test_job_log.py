"""A job's log on a terminal: lines as they come, the result apart, and what Ctrl-C asks."""

from __future__ import annotations

import io

import pytest

from pipeline.report.console import JobLog, wants_stop

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
