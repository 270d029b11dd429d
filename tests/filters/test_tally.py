"""Counts of a report: shards without rows change nothing, and many groups are counted together."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from finished import ROWS, Corpus, finish, toy_fingerprints, toy_spec

from pipeline.filters.dry_run import ALL, Size
from pipeline.filters.rule import SnapshotRule
from pipeline.filters.tally import MOST_GROUPS, OTHERS, Sizes, Tally
from pipeline.spec.parse import parse_spec
from pipeline.stores.local import LocalStore


@pytest.fixture
def rule(tmp_path: Path) -> SnapshotRule:
    corpus = Corpus(tmp_path / "in", tmp_path / "cache")
    corpus.write()
    store = LocalStore(tmp_path / "out")
    finish(store, corpus.shards(store), toy_fingerprints())
    keep = {"keep": "toxic.p.toxic < 0.5", "on_error": "keep"}
    return SnapshotRule.of(parse_spec(json.dumps(toy_spec(tmp_path, filter=keep))))


def counted(rule: SnapshotRule, batches: list[pa.RecordBatch]) -> Tally:
    tally = Tally(rule.contents.tasks, rule.judge(rule.policy), "keep", None)
    for batch in batches:
        tally.add(batch, [""] * batch.num_rows)
    return tally


def test_a_shard_without_rows_counts_nothing(rule: SnapshotRule) -> None:
    """A slice of an input leaves shards without rows."""
    batches = list(rule.answers())
    plain = counted(rule, batches)
    empty = counted(rule, [batches[0].slice(0, 0), *batches, batches[-1].slice(0, 0)])
    assert empty.all.by_group() == plain.all.by_group()
    assert empty.examples == plain.examples and empty.statuses == plain.statuses
    assert sum(size.documents for size in plain.all.by_group()[ALL]) == 3 * ROWS
    assert counted(rule, [batches[0].slice(0, 0)]).examples == []


def test_many_groups_are_counted_together_and_nothing_is_lost() -> None:
    names = [f"group {n}" for n in range(MOST_GROUPS + 50)]
    sizes, ones = Sizes(), np.ones(len(names), np.int64)
    sizes.add(sizes.codes(pa.array(names)), ones == 0, (ones, 2 * ones, 3 * ones))
    groups = sizes.by_group()
    assert len(groups) == MOST_GROUPS + 1
    assert groups[OTHERS] == (Size(50, 100, 150), Size())
    assert groups["group 0"] == (Size(1, 2, 3), Size())
