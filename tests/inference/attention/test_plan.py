"""The plan of a tree is its definition: every query meets every key it should, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipeline.inference.attention.plan import (
    AttentionPlan,
    Rows,
    Segment,
    plan_attention,
    plan_ends,
)
from pipeline.inference.attention.tree import Node, Tree

Grow = Callable[..., Any]

SEEDS = range(12)
WINDOWS = [None, 1, 2, 3, 5, 8, 13, 1_000]
PREFIXES = [0, 1, 7]


def rows_of(rows: Rows, copy: int) -> range:
    start = rows.start + copy * rows.stride
    return range(start, start + rows.tokens)


def pairs(call: Segment) -> Iterator[tuple[int, tuple[str, int]]]:
    """The (query, key) pairs of one call, read off the call's own description."""
    source = "prefix" if call.from_prefix else "row"
    assert call.queries.copies == call.keys.copies
    for copy in range(call.queries.copies):
        for i, query in enumerate(rows_of(call.queries, copy)):
            for j, key in enumerate(rows_of(call.keys, copy)):
                distance = call.offset + i - j
                in_window = call.window is None or distance < call.window
                if in_window and not (call.causal and distance < 0):
                    yield query, (source, key)


def calls(plan: AttentionPlan) -> list[Segment]:
    return [call for level in plan.levels for call in level]


def joined(plan: AttentionPlan) -> Counter[Any]:
    return Counter(pair for call in calls(plan) for pair in pairs(call))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("prefix_tokens", PREFIXES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_plan_joins_exactly_the_pairs_of_the_definition_each_once(
    seed: int, prefix_tokens: int, window: int | None, grow: Grow
) -> None:
    grown = grow(seed, prefix_tokens=prefix_tokens)
    defined = Counter(
        (row, key) for row in range(grown.tree.tokens) for key in grown.seen(row, window)
    )
    assert joined(plan_attention(grown.tree, window=window)) == defined


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("prefix_tokens", PREFIXES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_plan_of_ends_joins_what_their_rows_see(
    seed: int, prefix_tokens: int, window: int | None, grow: Grow
) -> None:
    grown = grow(seed, prefix_tokens=prefix_tokens)
    tree = grown.tree
    ends = [span.stop - 1 for span in tree.spans][:: 1 + seed % 2]
    rows = [start + end for start in tree.branch_starts for end in ends]
    defined = Counter((i, key) for i, row in enumerate(rows) for key in grown.seen(row, window))
    plan = plan_ends(tree, ends, window=window)
    assert joined(plan) == defined
    for call in calls(plan):  # one row sees a run of keys, so nothing has to be hidden
        assert not call.causal
        assert call.window is None or call.queries.tokens > 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("window", WINDOWS)
def test_the_first_level_holds_every_row_and_shows_it_itself_no_level_holds_one_twice(
    seed: int, window: int | None, grow: Grow
) -> None:
    tree = grow(seed, prefix_tokens=4).tree
    plan = plan_attention(tree, window=window)
    for level in plan.levels:
        asked = Counter(
            row
            for call in level
            for copy in range(call.queries.copies)
            for row in rows_of(call.queries, copy)
        )
        assert set(asked.values()) == {1}
    shown = {query for call in plan.levels[0] for query, key in pairs(call) if key[1] == query}
    assert shown == set(range(tree.tokens))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("window", WINDOWS)
def test_no_call_carries_a_blind_query_or_an_unseen_key(
    seed: int, window: int | None, grow: Grow
) -> None:
    for call in calls(plan_attention(grow(seed, prefix_tokens=4).tree, window=window)):
        met = list(pairs(call))
        assert len({query for query, _ in met}) == call.queries.tokens * call.queries.copies
        assert len({key for _, key in met}) == call.keys.tokens * call.keys.copies


@pytest.mark.parametrize("questions", [1, 2, 32])
def test_a_documents_keys_are_read_once_however_many_questions_follow(questions: int) -> None:
    tree = Tree.of([50, 20], [Node(3)] * questions, prefix_tokens=9)
    below = 3 * questions
    plan = plan_attention(tree, window=None)
    assert plan.levels[1:] == (
        (Segment(Rows(0, 70 + 2 * below), Rows(0, 9), from_prefix=True),),
        (
            Segment(Rows(70, below), Rows(0, 50)),
            Segment(Rows(70 + below, below), Rows(50, 20)),
        ),
    )


def test_a_question_is_one_call_for_all_documents() -> None:
    plan = plan_attention(Tree.of([5, 6, 7], [Node(3), Node(4)], prefix_tokens=0), window=None)
    questions = [Rows(18, 3, copies=3, stride=7), Rows(21, 4, copies=3, stride=7)]
    assert plan.levels[0][3:] == tuple(Segment(rows, rows, causal=True) for rows in questions)
