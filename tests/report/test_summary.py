"""Labels, names and paths stand in a run's summary as they are, whatever they look like."""

from __future__ import annotations

import io
from collections import Counter

import pytest
from rich.console import Console

from pipeline.report.run import show_summary
from pipeline.runtime.outcome import Outcome, Tally


@pytest.mark.parametrize("label", ["[a]", "[/a]", "[INST]", ":smile:"])
def test_what_looks_like_markup_is_shown_as_it_is(label: str) -> None:
    tally = Tally(rows=1, status=Counter(ok=1), labels={"t": Counter({label: 1})}, label_seconds=1)
    outcome = Outcome("/data/[x]/out", 1, 1, 0, tally, 1.0, ("/in/[/b].jsonl: is torn",), 1)
    shown = io.StringIO()
    show_summary(outcome, Console(file=shown, emoji=False, soft_wrap=True))
    told = shown.getvalue()
    assert f"{label} 100%" in told
    assert "/in/[/b].jsonl: is torn" in told
    assert told.count("/data/[x]/out") == 2  # the output, and the line that reads it


def test_a_label_does_not_steer_the_terminal() -> None:
    tally = Tally(rows=1, labels={"t": Counter({"a\x1b[31mb": 1})}, label_seconds=1)
    shown = io.StringIO()
    show_summary(Outcome("out", 1, 1, 0, tally, 1.0, (), 1), Console(file=shown))
    assert "\x1b" not in shown.getvalue() and "a\\x1b[31mb 100%" in shown.getvalue()
