"""One shard that fails ends no run: it is named, and tried again; a run in which all fail ends."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from changing_corpus import Corpus
from stages import fail_reads

from pipeline.errors import AssayError, ModelError, StorageError, UnavailableError
from pipeline.ledger.cells import WorkItem
from pipeline.ledger.counts import ShardCounts
from pipeline.runtime import graph
from pipeline.runtime.graph import label_items  # not those that `plain` replaces
from pipeline.runtime.job import make_job
from pipeline.runtime.placement import Placement
from pipeline.runtime.plan import plan
from pipeline.verbs.run import RunResult

SHARDS = 60


@pytest.fixture
def many(plain: Corpus, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """Sixty files of a shard each, too many to be read before Ray starts."""
    for number in range(SHARDS):
        plain.write(f"f{number:02d}", [f"text {number}.{row}" for row in range(3)])
    monkeypatch.setattr("pipeline.runtime.plan.SMALL_INPUT_BYTES", -1)
    return plain


def test_two_bad_shards_of_sixty_are_named_and_a_throttled_one_is_tried_again(
    many: Corpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def error(name: str, number: int) -> Exception | None:
        if name == "f17" and number <= 2:  # in the first two rounds
            return UnavailableError(f"{many.input}/f17.jsonl: too many requests")
        return StorageError("changed while the job ran") if name in ("f03", "f44") else None

    tries = fail_reads(monkeypatch, error)
    outcome = many.run()
    assert not outcome.complete and outcome.snapshot is None
    assert outcome.missing_shards == 2 and outcome.tally.n.total_of("rows") == 3 * (SHARDS - 2)
    assert tries["f17"] == 3 and many.asked.total() == 3 * (SHARDS - 2)
    reasons = [
        f"{many.input}/{name}.jsonl: rows 0 to 3: changed while the job ran"
        for name in ("f03", "f44")
    ]
    assert sorted(RunResult.of(outcome).failed_shards) == reasons
    assert "failed shards (2): " in outcome.left and all(each in outcome.left for each in reasons)
    shown = "a shard failed, and the others go on: "
    throttled = f"{shown}{many.input}/f17.jsonl: rows 0 to 3: too many requests"
    assert throttled in caplog.messages and f"{shown}{reasons[0]}" in caplog.messages
    fail_reads(monkeypatch, lambda _name, _number: None)
    whole = many.run()
    assert whole.complete and whole.failed_shards == () and many.asked.total() == 3 * 2
    many.check()


@pytest.mark.parametrize(("kind", "good"), [(UnavailableError, 0), (StorageError, 5)])
def test_a_run_ends_with_the_reason_when_twenty_shards_in_a_row_fail(
    kind: type[AssayError], good: int, many: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.runtime.graph.read_items", lambda *_: [])
    done: list[str] = []

    def error(name: str, _number: int) -> Exception | None:
        done.append(name)
        return None if len(done) <= good else kind("credentials expired\nmore of it")

    fail_reads(monkeypatch, error)
    match = "20 files or shards failed, and no shard succeeded between them"
    with pytest.raises(kind, match=match) as raised:
        many.run()
    assert len(done) == len(set(done)) == 20 + good
    assert str(raised.value).endswith(": rows 0 to 3: credentials expired")


def test_a_bad_file_of_many_shards_ends_no_run(
    plain: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.shard_bytes = 100
    plain.write("bad", ["a text of a hundred bytes or more, which is a shard of its own " * 2] * 30)
    good = {f"good{number}": [f"text {number}"] for number in range(30)}
    for name, texts in good.items():
        plain.write(name, texts)
    monkeypatch.setattr("pipeline.runtime.plan.SMALL_INPUT_BYTES", -1)
    error = StorageError(f"{plain.input}/bad.jsonl: cannot be read: it is gone")
    fail_reads(monkeypatch, lambda name, _number: error if name == "bad" else None)
    outcome = plain.run()
    assert (outcome.shards, outcome.missing_shards) == (60, 30) and outcome.snapshot is None
    assert outcome.tally.n.total_of("rows") == len(good)
    assert (
        outcome.failed_shards[0]
        == f"{plain.input}/bad.jsonl: rows 0 to 1: cannot be read: it is gone"
    )


def work_of(corpus: Corpus) -> tuple[Any, Sequence[WorkItem]]:
    job = make_job(corpus.spec, Placement("cpu", "float32", 1, 1), corpus.cache)
    return job, plan(job, corpus.store).work_items


def test_the_windows_of_a_graph_grow_with_the_engines(plain: Corpus) -> None:
    plain.write("a", ["a text"])
    job, _ = work_of(plain)
    items: Any = range(1_000_000)

    def sizes(actors: int) -> list[int]:
        placed = replace(job, placement=replace(job.placement, actors=actors))
        return [len(window) for window in graph._windows(items, placed)]

    assert sizes(1) == [10_000] * 100
    assert sizes(8_000) == [400_000, 400_000, 200_000]  # and not two shards for each model load


def test_no_window_begins_after_the_end_of_the_run(
    many: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, items = work_of(many)
    windows: list[int] = []

    def answer_none(window: Sequence[WorkItem], *_: Any) -> Any:
        windows.append(len(window))
        clock = SimpleNamespace(time=lambda: time.time() + 3_600)
        monkeypatch.setattr("pipeline.runtime.job.time", clock)
        return SimpleNamespace(iter_rows=lambda: iter(()))

    monkeypatch.setattr(graph, "WINDOW_SHARDS", 20)
    monkeypatch.setattr(graph, "WINDOW_SHARDS_PER_ENGINE", 1)
    ends_soon = replace(job, run=replace(job.run, ends=time.time() + 1_800))
    assert not [*graph.run_graph(answer_none, items, ends_soon)]
    assert len(items) == SHARDS and windows == [20]


def stub(folder: Path, deaths: int) -> type:
    """A worker on Ray that answers nothing; the first engines die while they start."""

    class Stub:
        def __init__(self, *_arguments: Any) -> None:
            for number in range(deaths):
                try:
                    os.close(os.open(folder / str(number), os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                raise RuntimeError("no memory\nfor the model")

        def __call__(self, _row: pa.Table) -> pa.Table:
            return graph._row_of(ShardCounts("s", ()))

    return Stub


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("shared_ray")
def test_engines_that_die_while_they_start_are_replaced_and_too_many_end_the_run(
    many: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, items = work_of(many)
    monkeypatch.setattr(graph, "START_DEATHS", 1)  # — each takes Ray seconds
    monkeypatch.setattr(graph, "ShardWorker", stub(tmp_path, deaths=1))
    assert len(list(label_items(items, job))) == SHARDS
    assert graph.build(items, job).context.execution_no_progress_timeout_s == -1
    (tmp_path / "more").mkdir()
    monkeypatch.setattr(graph, "ShardWorker", stub(tmp_path / "more", deaths=30))
    with pytest.raises(
        ModelError, match=r"keep ending while they start; .*for the model"
    ) as raised:
        list(label_items(items, job))
    assert "\n" not in str(raised.value)
