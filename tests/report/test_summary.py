"""A run's summary shows labels, names and paths as they are, what was kept, and what comes next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from outcomes import toy_outcome
from reports import printed

from pipeline.ledger.counts import Counts
from pipeline.report.run import show_run
from pipeline.runtime.outcome import Outcome, Tally
from pipeline.verbs.run import RunResult


def counted(rows: int = 1, label: str = "a", **numbers: int) -> Tally:
    """The counts of documents with this label, and others by key."""
    keys = ("rows", "ok"), ("label", "t", label), ("answered", "t")
    others = {tuple(name.split("_")): number for name, number in numbers.items()}
    return Tally(n=Counts({**dict.fromkeys(keys, rows), ("label_ms", "1"): 1_000, **others}))


def shown(outcome: Outcome) -> str:
    """What a run prints, with one space between words."""
    return " ".join(printed(show_run, RunResult.of(outcome)).split())


@pytest.mark.parametrize("label", ["[a]", "[/a]", "[INST]", ":smile:"])
def test_what_looks_like_markup_is_shown_as_it_is(label: str) -> None:
    unreadable = ("/in/[/b].jsonl: is torn",)
    words = shown(toy_outcome(counted(label=label), "/data/[x]/out", unreadable=unreadable))
    assert f"{label} 100%" in words
    assert "/in/[/b].jsonl: is torn" in words
    assert words.count("/data/[x]/out") == 1


@pytest.mark.parametrize("snapshot", [None, 3])
def test_files_that_cannot_be_read_name_the_option_that_publishes_the_others(
    snapshot: int | None,
) -> None:
    words = shown(toy_outcome(counted(), unreadable=("/b: is torn",), snapshot=snapshot))
    advice = "not published 1 of the files cannot be read; --publish-partial publishes the others"
    assert (advice in words) == (snapshot is None)


def test_the_option_is_named_with_what_forbids_it() -> None:
    judged: dict[str, Any] = {
        "unreadable": ("/b: is torn",),
        "publish": {"max_psi": 0.1},
        "snapshot": None,
    }
    first = "without publish in the spec, --publish-partial publishes"
    assert f"cannot be read; {first} the others" in shown(toy_outcome(counted(), **judged))
    kept = replace(toy_outcome(counted(), **judged), kept=4)
    assert f"stays current; {first} this run" in shown(kept)


def test_a_label_cannot_control_the_terminal() -> None:
    words = shown(toy_outcome(counted(label="a\x1b[31mb")))
    assert "\x1b" not in words and "a\\x1b[31mb 100%" in words


def test_no_share_is_nothing_or_all_by_rounding() -> None:
    words = shown(toy_outcome(counted(299, rows_empty=1), rows=300))
    assert "status ok 99.67%, empty 0.33%" in words and "in 1 shard " in words


def test_a_run_says_what_was_read_and_what_kept_its_answers() -> None:
    words = shown(toy_outcome(counted(330, asked_1=12, reused=318), rows=330))
    assert "labelled now 330; the model read 12 of them, and 318 kept the answers" in words
    assert "labelled now 0; every document has its answers" in shown(toy_outcome(Tally()))


def test_the_next_step_is_a_command_where_there_is_a_snapshot() -> None:
    assert shown(toy_outcome(Tally())).endswith("next: assay export SPEC --head 10")
    assert "next" not in shown(toy_outcome(Tally(), missing=True, snapshot=None))
