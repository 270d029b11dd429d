"""Cascades that fail, are killed or are ended: nothing is lost, and nothing is asked twice."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from changing_corpus import QUESTIONS, Corpus, asked_of, decided, write_shared
from command import COMMANDS, assay

from pipeline.runtime.job import Job, make_job
from pipeline.runtime.placement import Placement

LABELS = "labels/**/*.parquet"


@pytest.mark.parametrize("question", ["first", "second"])
def test_a_text_that_a_stage_cannot_answer_fails_and_is_tried_again(
    staged: Corpus, question: str
) -> None:
    texts = write_shared(staged)
    staged.decide(0.2, 0.8)
    reaching = sorted(
        text for text in {*texts.values()} if text and decided(text, 0.2, 0.8)[0] == 2
    )
    staged.broken.update((question, text) for text in reaching[:2])
    staged.run()
    for name, text in texts.items():
        row = staged.rows()[name]
        is_broken = text in reaching[:2]
        assert (row["status"] == "error:the model's answer is not a number") == is_broken
        if is_broken:
            assert (row["label"], row["stage"]) == (None, QUESTIONS.index(question) + 1)
    staged.run()
    assert not staged.asked
    staged.broken.discard((question, reaching[0]))
    staged.run(retry_failed=True)
    following = {("second", reaching[0])} if question == "first" else set()
    # — a retry asks about a text in each shard that has it
    assert set(staged.asked) == {*((question, text) for text in reaching[:2]), *following}
    staged.broken.clear()
    staged.run(retry_failed=True)
    following = {("second", reaching[1])} if question == "first" else set()
    assert set(staged.asked) == {(question, reaching[1]), *following}
    staged.check(0.2, 0.8)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("fault", "of_driver"),
    [("specs recorded", True), ("stage 2 asked", False), ("create 2", False), ("labelled", True)],
)
def test_a_killed_run_goes_on_and_loses_nothing(
    staged: Corpus, fault: str, of_driver: bool, command: Sequence[str]
) -> None:
    texts = write_shared(staged)
    staged.decide(-1.0, 1.5)
    code, _, errors = assay(staged.spec_file, command=command)
    assert code == 0, errors
    first = make_job(
        staged.spec.stage_specs()[0][0],
        Placement("cpu", "float32", 1, 1),
        staged.cache,
    )
    p = np.concatenate(
        [
            pq.read_table(file).column("p").combine_chunks().field("toxic").drop_null()
            for file in (staged.folder / "out" / "labels" / "toxic" / first.fp["toxic"]).rglob(
                "*.p*"
            )
        ]
    )
    half = float(np.median(p))
    staged.decide(*((half, 1.5) if half < 0.5 else (-1.0, half)))
    shutil.rmtree(staged.folder / "out")
    untouched = staged.folder / "untouched"
    code, whole, errors = assay(staged.spec_file, command=command)
    assert code == 0, errors
    expected = staged.rows()
    shutil.move(staged.folder / "out", untouched)
    code, _, _ = assay(
        staged.spec_file, fault=f"{fault}=die:{staged.folder / 'fault'}", command=command
    )
    assert code == (-9 if of_driver else 0)  # — a worker is replaced
    code, again, errors = assay(staged.spec_file, command=command)
    assert code == 0, errors
    assert staged.rows() == expected and expected.keys() == texts.keys()
    is_left = fault == "specs recorded"
    assert (again["documents_read_by_model"] > 0) == is_left
    decided = {"1", "2"} if is_left else set()
    assert set(again["decided_by_stage"].get("toxic", {})) == decided
    assert set(whole["decided_by_stage"]["toxic"]) == {"1", "2"}
    check_files(staged.folder / "out", untouched)


def check_files(output: Path, untouched: Path) -> None:
    """Both have the label files of the same cells, with the same answers."""
    files = [
        {file.relative_to(folder / "labels"): pq.read_table(file) for file in folder.rglob(LABELS)}
        for folder in (output, untouched)
    ]
    assert files[0].keys() == files[1].keys()
    assert all(table.equals(files[1][name]) for name, table in files[0].items())


def test_a_run_that_its_time_ends_keeps_what_is_answered(
    staged: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time ends before anything is read, then after each stage."""
    texts = write_shared(staged)
    staged.decide(0.2, 0.8)
    calls: list[Job] = []
    is_over = Job.is_over.fget
    asked: set[Any] = set()
    for checks in (0, 4, 8, 12):
        left = checks

        def is_over_after(job: Job) -> bool:
            nonlocal left
            left -= 1
            calls.append(job)
            return left < 0

        monkeypatch.setattr(Job, "is_over", property(is_over_after))
        outcome = staged.run(max_hours=1.0)
        assert not outcome.complete and outcome.stopped == "--max-hours 1"
        assert not asked & set(staged.asked)
        asked |= set(staged.asked)
    assert len(calls) > 24 and asked
    monkeypatch.setattr(Job, "is_over", property(is_over))
    assert staged.run(max_hours=1.0).complete
    assert asked | set(staged.asked) == asked_of(texts.values(), 0.2, 0.8)
    assert not asked & set(staged.asked)
    staged.check(0.2, 0.8)


@pytest.mark.parametrize("is_retry", [True, False])
def test_an_answer_after_a_failure_is_kept_under_other_thresholds(
    staged: Corpus, is_retry: bool
) -> None:
    texts = write_shared(staged)
    staged.decide(0.2, 0.8)
    failing = next(text for text in texts.values() if text and decided(text, 0.3, 0.7)[0] == 2)
    staged.broken.add(("second", failing))
    staged.run()
    staged.broken.clear()
    if not is_retry:
        staged.decide(0.25, 0.75)
    staged.run(retry_failed=is_retry)
    staged.assert_asked({("second", failing)})
    staged.decide(0.3, 0.7)
    staged.run()
    assert not staged.asked
    staged.check(0.3, 0.7)
