"""Counts of a report: shards without rows change nothing, and many groups are counted together."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from finished import ROWS, Corpus, finish, toy_fingerprints, toy_spec

from pipeline.filters.dry_run import ALL, Size
from pipeline.filters.policy import AUDIT, BoundClause, Clause
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


@pytest.mark.parametrize("batches", [1, 7])
def test_the_largest_groups_are_shown_wherever_they_come_and_nothing_is_lost(batches: int) -> None:
    """Small groups first; the largest group is the last one that occurs."""
    of_size = {f"group {n}": 1 + n // 3 for n in range(3 * MOST_GROUPS)}
    documents = [name for name, size in of_size.items() for _ in range(size)]
    sizes = Sizes()
    for part in np.array_split(np.array(documents), batches):
        ones = np.ones(len(part), np.int64)
        dropped = np.char.endswith(part, "0")
        sizes.add(sizes.codes(pa.array(part.tolist())), dropped, (ones, 2 * ones, 3 * ones))
    largest = sorted(of_size, key=lambda name: -of_size[name])[:MOST_GROUPS]
    groups = sizes.by_group()
    assert list(groups) == [*largest, OTHERS]
    for name in largest:
        count = of_size[name]
        pair = Size(count, 2 * count, 3 * count), Size()
        assert groups[name] == (pair[::-1] if name.endswith("0") else pair)
    left = Counter(name.endswith("0") for name in documents if name not in largest)
    assert groups[OTHERS] == tuple(Size(n, 2 * n, 3 * n) for n in (left[False], left[True]))


def test_a_group_that_is_called_as_the_others_is_counted_with_them() -> None:
    sizes, names = Sizes(), [OTHERS, *(f"group {n}" for n in range(MOST_GROUPS + 1))]
    ones = np.ones(len(names), np.int64)
    sizes.add(sizes.codes(pa.array(names)), ones == 0, (ones, ones, ones))
    groups = sizes.by_group()
    assert sum(kept.documents for kept, _ in groups.values()) == len(names)
    assert groups[OTHERS][0].documents >= 2


def test_histograms_are_those_of_the_largest_groups(rule: SnapshotRule) -> None:
    """Every document is a group of its own, but the last ones are one group."""
    batches = [*rule.answers()] * 3
    by = f"CASE WHEN doc_id LIKE '{len(batches) - 1} %' THEN 'large' ELSE doc_id END"
    clause = BoundClause(Clause(AUDIT, "0", by, math.inf), rule.schema)
    many = [
        batch.set_column(0, "doc_id", pa.array([f"{n} {i}" for i in range(batch.num_rows)]))
        for n, batch in enumerate(batches)
    ]

    def counts(shown: Sequence[str]) -> Tally:
        judge = rule.judge(rule.policy)
        tally = Tally(rule.contents.tasks, judge, "keep", clause, shown=shown)
        for batch in many:
            tally.add(batch, [""] * batch.num_rows)
        return tally

    first = counts(())
    assert first.groups.names.index("large") == len(first.groups.names) - 1 > MOST_GROUPS
    second = counts(first.groups.largest())
    labels = pa.Table.from_batches(many)  # noqa: F841 — DuckDB reads it by name
    scored = (
        f"select {by} as g, p from (select *, toxic.p.toxic as p from labels) where not isnan(p)"
    )
    large = duckdb.sql(f"select count(*) from ({scored}) where g = 'large'").fetchall()
    [of_toxic] = [h for h in second.histograms if (h.task, h.label) == ("toxic", "toxic")]
    shown = {name: sum(cells) for name, cells in of_toxic.counts(second.groups.names).items()}
    assert [(shown["large"],)] == large and shown["large"] > 2
    assert shown.keys() <= second.groups.by_group().keys()
    assert sum(shown.values()) == sum(of_toxic.sizes()[0])
