"""`assay status` counts what the store holds, while a run goes on or after it."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from calls import Assay, WriteSpec
from finished import Corpus, finish, toy_fingerprints
from hypothesis import given
from hypothesis import strategies as st
from toy_assay import main_of_toy

from pipeline.spec.parse import load_spec
from pipeline.stores.local import LocalStore
from pipeline.verbs.status import (
    SHORTEST_S,
    WINDOW_S,
    TaskStatus,
    docs_per_s,
    rate_of_last_run,
    status,
)

ROWS = [*(json.dumps({"id": f"d{i}", "text": f"Text {i}."}) for i in range(30)), "{broken"]
DOCS = len(ROWS) + 1  # the last is empty


@pytest.fixture
def spec_file(write_spec: WriteSpec, tmp_path: Path) -> Path:
    corpus = tmp_path / "corpus.jsonl"
    file = write_spec(input={"path": str(corpus), "id": "id", "shard_bytes": 2_600})
    corpus.write_text("\n".join([*ROWS, json.dumps({"id": "empty", "text": ""})]))
    return file


def test_before_the_first_run_every_document_is_missing_and_nothing_is_written(
    spec_file: Path, tmp_path: Path, assay: Assay
) -> None:
    counts = {"done": 0, "missing": DOCS, "failed": 0, "skipped": 0}
    assert assay("status", spec_file, "--json").json == {
        "documents": DOCS,
        "to_read": len(ROWS) - 1,
        "snapshot": None,
        "tasks": {"toxic": counts, "topic": counts},
        "reused": {"toxic": 0, "topic": 0},
        "docs_per_s": None,
        "eta_s": None,
    }
    assert not (tmp_path / "out").exists()


def test_after_a_run_each_document_is_done_or_failed(
    spec_file: Path, tmp_path: Path, assay: Assay
) -> None:
    assert main_of_toy(["run", str(spec_file)]) == 0
    result = assay("status", spec_file, "--json").json
    counts = {"done": DOCS - 1, "missing": 0, "failed": 1, "skipped": 0}
    assert result["tasks"] == {"toxic": counts, "topic": counts}
    assert (result["documents"], result["snapshot"], result["eta_s"]) == (DOCS, 1, 0.0)
    words = assay("status", spec_file).words
    assert "snapshot 00000001 time left nothing is missing" in words and "rate" not in words
    corpus = tmp_path / "corpus.jsonl"
    new = [json.dumps({"id": f"n{i}", "text": f"New {i}."}) for i in range(5)]
    corpus.write_text("\n".join([corpus.read_text().replace("Text 3.", "Edited."), *new]))
    grown = assay("status", spec_file, "--json").json
    assert grown["documents"] == DOCS + 5 and grown["to_read"] == 6
    words = assay("status", spec_file).words
    assert "to read at most 6;" in words
    assert re.search(r"snapshot 00000001; it lacks up to \d+ documents of new or", words)
    assert "read by the model at most 6 documents;" in assay("run", spec_file, "--dry-run").words


def test_each_snapshot_is_listed_with_what_changed(
    spec_file: Path, tmp_path: Path, assay: Assay
) -> None:
    spec = load_spec(str(spec_file))
    store, corpus = LocalStore(Path(spec.output)), Corpus(tmp_path / "in", tmp_path / "cache")
    corpus.write()
    first, second = toy_fingerprints("1"), toy_fingerprints("2")
    finish(store, corpus.shards(store), first, name=spec.name)
    corpus.write_file(1, seed=5)
    finish(store, corpus.shards(store), {**first, "topic": second["topic"]}, name=spec.name)
    one, two = assay("status", spec_file, "--snapshots", "--json").json["snapshots"]
    assert [*one["changed"].items()] == [("topic", ["new"]), ("toxic", ["new"])]
    assert one["new_shards"] > 1
    assert [*two["changed"]] == ["topic"] and two["new_shards"] == two["removed_shards"] > 0
    shown = assay("status", spec_file, "--snapshots").words
    assert "topic: new; toxic: new; input: " in shown


def test_what_is_deleted_of_one_task_is_missing_in_that_task(
    spec_file: Path, tmp_path: Path
) -> None:
    assert main_of_toy(["run", str(spec_file)]) == 0
    labels = tmp_path / "out" / "labels"
    now = time.time()
    for task in ("toxic", "topic"):
        for number, file in enumerate(sorted((labels / task).rglob("*.parquet"))):
            os.utime(file, (now - 100 + number, now - 100 + number))
    next((labels / "topic").rglob("*.parquet")).unlink()
    result = status(load_spec(str(spec_file)), cache_dir=tmp_path)
    assert result.tasks["toxic"] == TaskStatus(done=DOCS - 1, missing=0, failed=1)
    missing = result.tasks["topic"].missing
    assert 0 < missing < DOCS
    assert result.tasks["topic"].done + result.tasks["topic"].failed == DOCS - missing
    assert result.docs_per_s is not None
    assert result.eta_s == pytest.approx(missing / result.docs_per_s)


@given(
    gaps=st.lists(st.floats(0.5, 60), min_size=2, max_size=10),
    documents=st.integers(1, 50),
    wait=st.floats(0, 60),
)
def test_the_rate_is_what_was_committed_after_the_first_commit_over_the_time_since(
    gaps: list[float], documents: int, wait: float
) -> None:
    times = [1e9 + sum(gaps[: i + 1]) for i in range(len(gaps))]
    now = times[-1] + wait
    rate = docs_per_s([(at, documents) for at in reversed(times)], now)
    if now - times[0] < SHORTEST_S:
        assert rate is None
    else:
        assert rate == pytest.approx(documents * (len(times) - 1) / (now - times[0]))
    later = now + WINDOW_S + 1
    assert docs_per_s([(at, documents) for at in times], later) is None


NIGHT_S = 86_400.0


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([], None),
        ([0], None),
        ([0, 4], None),
        ([0, 10, 20], 1),
        ([0, 10, NIGHT_S, NIGHT_S + 20], 0.5),
        ([0, 10, NIGHT_S], None),
        ([n * NIGHT_S + at for n in range(9) for at in (0, 40)], 0.25),
        ([0, 3_600, 7_201, 8_201], 0.01),
    ],
)
def test_the_rate_is_that_of_the_last_run(times: list[float], expected: float | None) -> None:
    assert rate_of_last_run([(at, 10) for at in reversed(times)]) == pytest.approx(expected)
