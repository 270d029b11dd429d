"""A run's summary shows labels, names and paths as they are, and a command that reads the rows."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from finished import FILES, ROWS, Corpus, finish, toy_fingerprints
from outcomes import toy_outcome
from reports import printed

from pipeline.ledger.counts import Counts
from pipeline.report.run import show_summary
from pipeline.runtime.outcome import Tally
from pipeline.stores.local import LocalStore

REPOSITORY = Path(__file__).parents[2]


def labelled_as(label: str) -> Tally:
    """The counts of one document with this label."""
    keys = ("rows", "ok"), ("label", "t", label), ("answered", "t")
    return Tally(n=Counts({**dict.fromkeys(keys, 1), ("label_ms", "1"): 1_000}))


@pytest.mark.parametrize("label", ["[a]", "[/a]", "[INST]", ":smile:"])
def test_what_looks_like_markup_is_shown_as_it_is(label: str) -> None:
    unreadable = ("/in/[/b].jsonl: is torn",)
    outcome = toy_outcome(labelled_as(label), "/data/[x]/out", unreadable=unreadable)
    shown = printed(show_summary, outcome)
    assert f"{label} 100%" in shown
    assert "/in/[/b].jsonl: is torn" in shown
    assert shown.count("/data/[x]/out") == 2  # the output, and the line that reads it


@pytest.mark.parametrize("snapshot", [None, 3])
def test_files_that_cannot_be_read_name_the_option_that_publishes_the_others(
    snapshot: int | None,
) -> None:
    outcome = toy_outcome(labelled_as("a"), unreadable=("/b: is torn",), snapshot=snapshot)
    shown = " ".join(printed(show_summary, outcome).split())
    advice = "not published 1 of the files cannot be read; --publish-partial publishes the others"
    assert (advice in shown) == (snapshot is None)


def test_a_label_does_not_steer_the_terminal() -> None:
    shown = printed(show_summary, toy_outcome(labelled_as("a\x1b[31mb")))
    assert "\x1b" not in shown and "a\\x1b[31mb 100%" in shown


@pytest.mark.parametrize("folder", ["out", "it's $HOME"])
def test_the_printed_command_reads_each_document_once_after_a_rewording(
    folder: str, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / folder)
    corpus = Corpus(tmp_path / "corpus", tmp_path / "cache")
    corpus.write()
    shards = corpus.shards(store)
    finish(store, shards, toy_fingerprints("1"))
    number = finish(store, shards, toy_fingerprints("2"))
    outcome = toy_outcome(Tally(), tmp_path / folder, rows=90, snapshot=number)
    *_, command = printed(show_summary, outcome).splitlines()
    counted = command.replace("select * from", "select count(*) as documents from")
    assert counted != command
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(counted, shell=True, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert f" {FILES * ROWS} " in ended.stdout


def test_without_a_snapshot_there_is_no_command_to_read_it() -> None:
    outcome = toy_outcome(Tally(), missing=True, snapshot=None)
    assert "open_labels" not in printed(show_summary, outcome)


def test_the_printed_command_opens_a_store_with_its_options() -> None:
    options = {"profile": "labels"}
    outcome = toy_outcome(Tally(), "s3://bucket/out", storage_options=options)
    assert "profile" not in repr(outcome)
    call = "open_labels('s3://bucket/out', storage_options={'profile': 'labels'})"
    assert call in printed(show_summary, outcome)
