"""A run's summary shows labels, names and paths as they are, and a command that reads the rows."""

from __future__ import annotations

import io
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from finished import FILES, ROWS, Corpus, finish, toy_fingerprints
from outcomes import toy_outcome

from pipeline.report.console import console_on
from pipeline.report.run import show_summary
from pipeline.runtime.outcome import Tally
from pipeline.stores.local import LocalStore

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("label", ["[a]", "[/a]", "[INST]", ":smile:"])
def test_what_looks_like_markup_is_shown_as_it_is(label: str) -> None:
    tally = Tally(
        rows=1,
        status=Counter(ok=1),
        labels={"t": Counter({label: 1})},
        costs={"1": Counter(label_seconds=1)},
    )
    outcome = toy_outcome(tally, "/data/[x]/out", unreadable=("/in/[/b].jsonl: is torn",))
    shown = io.StringIO()
    show_summary(outcome, console_on(shown))
    told = shown.getvalue()
    assert f"{label} 100%" in told
    assert "/in/[/b].jsonl: is torn" in told
    assert told.count("/data/[x]/out") == 2  # the output, and the line that reads it


def test_a_label_does_not_steer_the_terminal() -> None:
    tally = Tally(
        rows=1, labels={"t": Counter({"a\x1b[31mb": 1})}, costs={"1": Counter(label_seconds=1)}
    )
    shown = io.StringIO()
    show_summary(toy_outcome(tally), console_on(shown))
    assert "\x1b" not in shown.getvalue() and "a\\x1b[31mb 100%" in shown.getvalue()


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
    shown = io.StringIO()
    outcome = toy_outcome(Tally(), tmp_path / folder, rows=90, snapshot=number)
    show_summary(outcome, console_on(shown))
    *_, command = shown.getvalue().splitlines()
    counted = command.replace("select * from", "select count(*) as documents from")
    assert counted != command
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(counted, shell=True, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert f" {FILES * ROWS} " in ended.stdout


def test_without_a_snapshot_there_is_no_command_to_read_it() -> None:
    shown = io.StringIO()
    show_summary(toy_outcome(Tally(), missing=True, snapshot=None), console_on(shown))
    assert "open_labels" not in shown.getvalue()


def test_the_printed_command_opens_a_store_with_its_options() -> None:
    shown = io.StringIO()
    options = {"profile": "labels"}
    outcome = toy_outcome(Tally(), "s3://bucket/out", storage_options=options)
    show_summary(outcome, console_on(shown))
    assert "profile" not in repr(outcome)
    assert "open_labels('s3://bucket/out', storage_options={'profile': 'labels'})" in (
        shown.getvalue()
    )
