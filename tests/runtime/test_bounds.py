"""A run with a bound ends between shards, keeps what it has, and reports what is left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
from changing_corpus import Corpus, numbered
from toy_assay import main_of_toy

HOUR = 3600.0


def test_shards_that_have_begun_are_finished_and_the_next_run_goes_on(
    plain: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcd":
        plain.write(name, numbered(name, 10))
    # — each document takes a minute
    clock = SimpleNamespace(time=lambda: time.time() + 60 * plain.asked.total())
    monkeypatch.setattr("pipeline.runtime.job.time", clock)
    outcome = plain.run(max_hours=25 / 60)
    assert outcome.stopped is not None and outcome.stopped.startswith("--max-hours")
    assert not outcome.complete and outcome.snapshot is None
    answered = set(plain.asked)
    assert 25 <= len(answered) == 40 - outcome.missing_rows < 40
    part = plain.run(max_hours=1e-9, publish_partial=True)
    assert part.snapshot == 1 and len(plain.rows()) == len(answered) and not plain.asked
    whole = plain.run()
    assert whole.complete and whole.snapshot == 2 and whole.stopped is None
    assert plain.asked.total() == 40 - len(answered) and not answered & set(plain.asked)
    plain.check()


def test_a_run_whose_time_is_over_reads_no_texts(
    plain: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.write("a", numbered("a", 40))
    monkeypatch.setattr("pipeline.runtime.plan.SMALL_INPUT_BYTES", -1)
    # — the time ends between the start of the first round and the first shard
    later_s = chain([0], repeat(2 * HOUR))
    clock = SimpleNamespace(time=lambda: time.time() + next(later_s))
    monkeypatch.setattr("pipeline.runtime.job.time", clock)
    outcome = plain.run(max_hours=1)
    assert outcome.missing_rows == 40 and outcome.stopped == "--max-hours 1"
    written = {item.key.partition("/")[0] for item in plain.store.list("")}
    assert not plain.asked and written <= {"inputs", "specs"}
    monkeypatch.setattr("pipeline.runtime.job.time", time)
    assert plain.run(max_hours=1).complete and plain.asked.total() == 40


def test_a_run_whose_time_is_over_ends_with_3_and_reports_what_is_left_and_how_to_go_on(
    write_spec: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(write_spec()), "--max-hours", "1e-9"]
    assert main_of_toy(words) == 3
    line = capsys.readouterr().out.strip().splitlines()[-1]
    left = "left: 1 of 1 shards and 1 of 1 documents; run the same command again to go on"
    assert line == f"ended by --max-hours 1e-09; {left}"
    assert main_of_toy([*words, "--json"]) == 3
    shown = json.loads(capsys.readouterr().out)
    assert (shown["stopped"], shown["missing_documents"]) == ("--max-hours 1e-09", 1)
    assert not list((tmp_path / "out").glob("labels/**/*.parquet"))
