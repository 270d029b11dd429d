"""The speed of a report is that of the last run, whatever the nights before were like."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from finished import LABELS, Corpus, finish, toy_fingerprints

from pipeline.ledger.snapshots import contents
from pipeline.stores.local import LocalStore
from pipeline.verbs.corpus_report import _pace

EVENING_S, NIGHT_S = 1_700_000_000.0, 86_400.0


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "out")


def finish_at(
    store: LocalStore, corpus: Corpus, seconds: Sequence[float]
) -> list[tuple[float, int]]:
    """Labels and publishes the new shards; when each is committed, and its rows."""
    before = {path.name for path in store.root.glob("documents/*.parquet")}
    shards = corpus.shards(store)
    finish(store, shards, toy_fingerprints())
    new = [shard for shard in shards if f"{shard.id}.parquet" not in before]
    commits = [(second, shard.rows) for second, shard in zip(seconds, new, strict=True)]
    for shard, (second, _) in zip(new, commits, strict=True):
        for number, task in enumerate(LABELS):  # — the last task's file completes the shard
            (file,) = store.root.glob(f"labels/{task}/*/*/{shard.id}.parquet")
            os.utime(file, (second - number, second - number))
    return commits


def test_an_idle_night_does_not_count(store: LocalStore, tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "in", tmp_path / "cache")
    corpus.folder.mkdir()
    for number in range(2):
        corpus.write_file(number, 0)
    first = finish_at(store, corpus, [EVENING_S + 10 * n for n in range(6)])
    rows = sum(rows for _, rows in first[1:])
    assert _pace(store, contents(store, 1), None) == (50, rows / 50)
    corpus.write_file(2, 0)
    night = EVENING_S + NIGHT_S
    # — the second night begins with a shard, and a pause of two hours
    second = finish_at(store, corpus, [night - 7_200, night, night + 20])
    after, before = contents(store, 2), contents(store, 1)
    assert _pace(store, after, before) == (20, second[-1][1] / 20)
    # — without the snapshot before, the pauses between commits tell the nights apart
    assert _pace(store, after, None) == (20, second[-1][1] / 20)
    # — a snapshot without new answers has no speed
    assert _pace(store, before, after) == (None, None)
