"""Counts of a report: shards without rows change nothing, and many groups are counted together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from finished import ROWS, Corpus, finish_folder, toy_spec
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import StorageError
from pipeline.filters.decisions import MOST_GROUPS, OTHERS, Decisions, Size, decided, scratch
from pipeline.filters.rule import SnapshotRule
from pipeline.spec.parse import parse_spec
from pipeline.verbs.corpus_report import BARS, ShownDocument, bar_counts, examples


@pytest.fixture
def rule(tmp_path: Path) -> SnapshotRule:
    Corpus(tmp_path / "in", tmp_path / "cache").write()
    finish_folder(tmp_path)
    keep = {"keep": "toxic.p.toxic < 0.5", "on_error": "keep"}
    return SnapshotRule.of(parse_spec(json.dumps(toy_spec(tmp_path, filter=keep))))


def counted(
    rule: SnapshotRule, batches: list[pa.RecordBatch]
) -> tuple[tuple[Size, Size], list[ShownDocument], dict[str, int]]:
    """Sizes, examples and statuses of these shards."""
    with decided(rule.rule, batches, "keep") as table:
        shown = examples(table, rule.labelled.contents.tasks)
        return table.whole, [*shown], table.counts("status")


def test_a_shard_without_rows_counts_nothing(rule: SnapshotRule) -> None:
    """A condition of a run leaves shards without rows."""
    batches = list(rule.labelled.batches({}))
    plain = counted(rule, batches)
    empty = [batches[0].slice(0, 0), *batches, batches[-1].slice(0, 0)]
    assert counted(rule, empty) == plain
    (kept, dropped), shown, _ = plain
    assert kept.documents + dropped.documents == 3 * ROWS and len(shown) > 10
    assert counted(rule, empty[:1]) == ((Size(), Size()), [], {})


@pytest.fixture
def table() -> Iterator[Decisions]:
    with scratch() as table:
        yield table


def add(table: Decisions, groups: list[str], dropped: list[bool], **columns: object) -> None:
    """Documents of one character and three tokens."""
    n_chars = pa.array([1] * len(groups), pa.int64())
    sizes = {"n_chars": n_chars, "_tokens": pa.array([3] * len(groups), pa.int32())}
    table.add("documents", pa.table({"_group": groups, "_dropped": dropped, **sizes, **columns}))


def toxic(p: np.ndarray) -> pa.Array:
    """Answers with these probabilities of the label `toxic`."""
    return pa.array([{"p": {"toxic": each}} for each in p.tolist()])


@pytest.mark.parametrize("batches", [1, 7])
def test_the_largest_groups_are_shown_wherever_they_come_and_nothing_is_lost(
    batches: int, table: Decisions
) -> None:
    """Small groups first; the largest group is the last one that occurs."""
    of_size = {f"group {n:03}": 1 + n // 3 for n in range(3 * MOST_GROUPS)}
    documents = [name for name, size in of_size.items() for _ in range(size)]
    for part in np.array_split(np.array(documents), batches):
        add(table, part.tolist(), [name.endswith("0") for name in part])
    largest = sorted(of_size, key=lambda name: (-of_size[name], name))[:MOST_GROUPS]
    groups = table.sizes("_group", MOST_GROUPS)
    assert list(groups) == [*largest, OTHERS]
    for name in largest:
        count = of_size[name]
        pair = Size(count, count, 3 * count), Size()
        assert groups[name] == (pair[::-1] if name.endswith("0") else pair)
    left = Counter(name.endswith("0") for name in documents if name not in largest)
    assert groups[OTHERS] == tuple(Size(n, n, 3 * n) for n in (left[False], left[True]))


def test_a_group_that_is_called_as_the_others_is_counted_with_them(table: Decisions) -> None:
    names = [OTHERS, OTHERS, *(f"group {n}" for n in range(MOST_GROUPS + 1))]
    add(table, names, [False] * len(names), toxic=toxic(np.full(len(names), 0.5)))
    groups = table.sizes("_group", MOST_GROUPS)
    assert sum(kept.documents for kept, _ in groups.values()) == len(names)
    assert groups[OTHERS][0].documents == 4


EDGES = st.integers(0, BARS).map(lambda bar: bar / BARS)


@given(st.lists(EDGES | st.floats(0, 1, width=32), min_size=1))
def test_a_bar_has_the_probabilities_from_its_left_end_on(values: list[float]) -> None:
    p = np.array(values, np.float32)
    with scratch() as table:
        add(
            table,
            ["all"] * len(p),
            [False] * len(p),
            toxic=toxic(np.append(p[1:], np.float32("nan"))),
        )
        counts = bar_counts(table, "toxic.p.toxic", 0, 1)
    bars = np.minimum(p[1:].astype(np.float64) * BARS, BARS - 1).astype(int)
    assert counts == tuple(np.bincount(bars, minlength=BARS).tolist())


def test_a_table_that_cannot_be_written_says_what_to_do() -> None:
    fix = "set TMPDIR to a folder with more room"
    with pytest.raises(StorageError, match=fix), scratch() as table:
        table.rows("pragma memory_limit = '1KB'")
        table.add("documents", pa.table({"n_chars": np.arange(1_000_000)}))
