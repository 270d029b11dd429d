"""Progress of a run: its lines, and the message after Ctrl-C."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
from label_tables import toy_shard

from pipeline.ledger.cells import Committed, WorkItem
from pipeline.ledger.cuts import Cuts
from pipeline.report.progress import (
    LOG_INTERVAL_S,
    REUSE,
    Lines,
    Pace,
    fit_progress,
    kept_line,
    run_progress,
    work_line,
)
from pipeline.runtime.plan import Plan
from pipeline.runtime.progress import LABELLING, LOADING, READING, READING_TEXTS, Progress
from pipeline.sources.shards import Shard

COUNTED = Progress(LABELLING, documents=100)


def labelled(done: int, documents: int = 100, failed: int = 0) -> Progress:
    """Of documents that all cost the same."""
    counts = {"documents": documents, "answered": done, "work_done": done, "failed": failed}
    return replace(COUNTED, **counts)


FIRST, SECOND = SHARDS = (toy_shard(rows=60), toy_shard(60, rows=40))


def work(shard: Shard = FIRST, rows_without_answer: int | None = None) -> WorkItem:
    return WorkItem(shard, ("toxic",), documents=False, rows_without_answer=rows_without_answer)


def plan(*work_items: WorkItem, shards: tuple[Shard, ...] = SHARDS) -> Plan:
    return Plan(Cuts(shards, ()), Committed({}, {}, {}, {}), work_items)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Cell(io.StringIO):
    """As ipykernel's: it is no terminal, and its descriptor is that of the kernel's terminal."""

    def fileno(self) -> int:
        raise AssertionError("a notebook shows nothing that is written there")


Cell.__module__ = "ipykernel.iostream"


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_log_has_each_phase_the_first_documents_ten_seconds_and_the_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock_s = [0.0]
    caplog.set_level(logging.INFO)
    show = Lines(logging.getLogger().info, lambda: clock_s[0])
    for second, shown in (
        (0, Progress(LOADING)),
        (1, Progress(LOADING)),
        (LOG_INTERVAL_S, Progress(LOADING)),
        (10, COUNTED),
        (12, labelled(4)),
        (13, labelled(6)),
        (12 + LOG_INTERVAL_S, labelled(11, failed=1)),
        (30, labelled(100)),
        (31, labelled(100)),
        (32, Progress("publishing", documents=100, answered=100)),
    ):
        clock_s[0] = second
        show(shown)
    assert messages(caplog) == [
        "loading the model",
        "loading the model, 9 s so far",
        "labelling",
        "4 of 100 documents labelled, 1.3/s, 0:01:12 left",
        "11 of 100 documents labelled, 55.0/min, 0:01:37 left, 9.09% failed",
        "100 of 100 documents labelled, 4.8/s",
        "publishing",
    ]


def test_a_log_says_that_a_phase_in_which_nothing_was_answered_yet_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock_s = [0.0]
    show = Lines(logging.getLogger().info, lambda: clock_s[0])
    for clock_s[0] in (0.0, LOG_INTERVAL_S, 2 * LOG_INTERVAL_S):
        show(COUNTED)
    assert messages(caplog) == ["labelling", *["0 of 100 documents labelled"] * 2]


def test_the_rate_is_that_of_the_last_minute() -> None:
    pace = Pace(0)
    for second in range(1_000):  # ten a second, then one
        done = 10 * second if second < 500 else 5_000 + second - 500
        pace.add(second, labelled(done, 10_000))
    assert pace.rate == pytest.approx(1, rel=0.02)
    # — nothing for a while: the rate falls, and is not zero
    pace.add(1_090, labelled(5_499, 10_000))
    assert pace.rate is not None and 0 < pace.rate < 0.6


@pytest.mark.parametrize(
    ("second", "done", "work_done", "figures"),
    [
        # — of slow documents, those of a minute
        (120, 4, 4.0, ("2.0/min", "0:48:00 left")),
        # — long documents are read first, so the time left follows the cost and not the number
        (20, 5, 50.0, ("15.0/min", "0:00:20 left")),
    ],
)
def test_the_rate_and_the_time_left_are_those_of_the_documents(
    second: float, done: int, work_done: float, figures: tuple[str, ...]
) -> None:
    pace, shown = Pace(0), replace(COUNTED, answered=done, work_done=work_done)
    assert pace.figures(COUNTED) == ()
    pace.add(second, shown)
    assert pace.figures(shown) == figures


def test_reading_is_counted_and_the_phases_around_it_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with fit_progress(io.StringIO()) as announce:
        assert messages(caplog) == ["starting"]
        for done in (0, 4, 10):
            announce(Progress(READING, documents=10, answered=done, work_done=done))
        announce(Progress("fitting"))
    assert [line.split(",")[0] for line in messages(caplog)[1:]] == [
        "reading",
        "4 of 10 documents read",
        "10 of 10 documents read",
        "fitting",
    ]


TO_LABEL = "60 of 100 documents to label, in 1 of 2 shards"


@pytest.mark.parametrize(
    ("planned", "line"),
    [
        (plan(), "nothing to do: 100 documents in 2 shards"),
        (plan(shards=(FIRST,)), "nothing to do: 60 documents in 1 shard"),
        (plan(work()), TO_LABEL),
        (
            plan(work(FIRST, rows_without_answer=40)),
            f"{TO_LABEL}; the model reads at most 40 of them: {REUSE}",
        ),
        (plan(work(FIRST, rows_without_answer=0)), f"{TO_LABEL}; the model reads none of them"),
        (
            replace(plan(work(FIRST), shards=(FIRST,)), limit="sample < 0.1"),
            "60 of 60 documents to label, in 1 of 1 shards; only those with sample < 0.1 "
            "are labelled",
        ),
    ],
)
def test_the_first_line_says_how_many_documents_the_model_reads(planned: Plan, line: str) -> None:
    assert work_line(planned) == line


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (None, "nothing was lost"),
        (Progress("x", plan()), "nothing was lost"),
        (Progress("x", plan(work()), documents=60), "at least 0 of 60 documents are kept"),
        (
            Progress("x", plan(work()), documents=60, answered=25, committed=20),
            "at least 20 of 60 documents are kept; 5 in unfinished shards are asked again",
        ),
        (
            Progress(READING_TEXTS, plan(work()), documents=60, answered=25),
            "at least 0 of 60 documents are kept",
        ),
    ],
)
def test_a_run_that_is_stopped_says_what_is_kept(progress: Progress | None, line: str) -> None:
    assert kept_line(progress) == line


def test_a_run_shows_its_plan_once_and_ctrl_c_carries_what_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    def stopped(announce: Callable[[Progress], None]) -> None:
        planned = plan(work())
        announce(Progress("starting Ray"))
        announce(Progress(LOADING, planned))
        announce(Progress(LABELLING, planned, documents=60, answered=6, committed=6, work_done=6))
        raise KeyboardInterrupt

    kept = "at least 6 of 60 documents are kept"
    with pytest.raises(KeyboardInterrupt, match=kept), run_progress(io.StringIO()) as announce:
        stopped(announce)
    assert messages(caplog) == [
        "starting",
        "starting Ray",
        "60 of 100 documents to label, in 1 of 2 shards",
        "loading the model",
        "labelling",
        "6 of 60 documents labelled",
    ]


@pytest.mark.parametrize("stream", [Terminal(), Cell()])
def test_a_terminal_and_a_cell_of_a_notebook_have_the_lines_without_a_log(
    stream: io.StringIO,
) -> None:
    with run_progress(stream) as announce:
        announce(Progress("labelling\r", plan(work())))
    assert stream.getvalue().splitlines() == ["starting", TO_LABEL, "labelling "]
