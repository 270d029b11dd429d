"""The plan of a tree is its definition: every query meets every key it should, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipeline.inference.tree import Call, Node, Span, Tree, plan_attention

Grow = Callable[..., Any]

SEEDS = range(12)
WINDOWS = [None, 1, 2, 3, 5, 8, 13, 1_000]
PREFIXES = [0, 1, 7]


def pairs(call: Call) -> Iterator[tuple[int, tuple[str, int]]]:
    """The (query, key) pairs of one call, read off the call's own description."""
    source = "prefix" if call.from_prefix else "row"
    for i, query in enumerate(range(call.query_start, call.query_stop)):
        for j, key in enumerate(range(call.key_start, call.key_stop)):
            distance = call.query_position + i - call.key_position - j
            in_window = call.window is None or 0 <= distance < call.window
            if in_window and (not call.causal or j <= i):
                yield query, (source, key)


def test_the_example_of_the_docstring() -> None:
    tree = Tree.of([Node(3, (Node(2), Node(2)))], prefix_tokens=5)
    assert tree.positions == [5, 6, 7, 8, 9, 8, 9]
    assert tree.spans == (
        Span(start=0, stop=3, subtree_stop=7, position=5),
        Span(start=3, stop=5, subtree_stop=5, position=8),
        Span(start=5, stop=7, subtree_stop=7, position=8),
    )
    assert tree.leaf_rows == [4, 6]


def test_a_tree_without_spans_has_no_tokens() -> None:
    tree = Tree.of([], prefix_tokens=3)
    assert (tree.tokens, tree.positions, tree.leaf_rows) == (0, [], [])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("prefix_tokens", PREFIXES)
def test_a_position_counts_the_tokens_above(seed: int, prefix_tokens: int, grow: Grow) -> None:
    grown = grow(seed, prefix_tokens=prefix_tokens)
    assert grown.tree.tokens == len(grown.paths)
    assert grown.tree.positions == [len(path) - 1 for path in grown.paths]


@pytest.mark.parametrize("seed", SEEDS)
def test_spans_lie_end_to_end_with_their_descendants_right_behind(seed: int, grow: Grow) -> None:
    grown = grow(seed)
    row = 0
    for span in grown.tree.spans:
        assert (span.start, span.stop) == (row, row + span.tokens)
        row = span.stop
        last = ("row", span.stop - 1)
        descendants = [r for r, path in enumerate(grown.paths) if last in path[:-1]]
        assert descendants == list(range(span.stop, span.subtree_stop))


@pytest.mark.parametrize("seed", SEEDS)
def test_leaf_rows_are_those_that_nobody_sees_but_themselves(seed: int, grow: Grow) -> None:
    grown = grow(seed)
    seen = Counter(key for path in grown.paths for key in path)
    alone = [row for row in range(grown.tree.tokens) if seen["row", row] == 1]
    assert grown.tree.leaf_rows == alone


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("prefix_tokens", PREFIXES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_plan_joins_exactly_the_pairs_of_the_definition_each_once(
    seed: int, prefix_tokens: int, window: int | None, grow: Grow
) -> None:
    grown = grow(seed, prefix_tokens=prefix_tokens)
    plan = plan_attention(grown.tree, window=window)
    joined = Counter(pair for call in (*plan.selves, *plan.ancestors) for pair in pairs(call))
    defined = Counter(
        (row, key) for row in range(grown.tree.tokens) for key in grown.seen(row, window)
    )
    assert joined == defined


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("window", WINDOWS)
def test_own_spans_come_first_cover_every_row_in_order_and_show_it_itself(
    seed: int, window: int | None, grow: Grow
) -> None:
    plan = plan_attention(grow(seed, prefix_tokens=4).tree, window=window)
    queries = [row for call in plan.selves for row in range(call.query_start, call.query_stop)]
    assert queries == list(range(len(queries)))
    shown = {query for call in plan.selves for query, key in pairs(call) if key == ("row", query)}
    assert shown == set(queries)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("window", WINDOWS)
def test_no_call_carries_a_blind_query_or_an_unseen_key(
    seed: int, window: int | None, grow: Grow
) -> None:
    plan = plan_attention(grow(seed, prefix_tokens=4).tree, window=window)
    for call in (*plan.selves, *plan.ancestors):
        met = list(pairs(call))
        assert len({query for query, _ in met}) == call.query_stop - call.query_start
        assert len({key for _, key in met}) == call.key_stop - call.key_start


@pytest.mark.parametrize("questions", [1, 2, 32])
def test_a_documents_keys_are_read_once_however_many_questions_follow(questions: int) -> None:
    roots = [Node(50, tuple(Node(3) for _ in range(questions))), Node(20, (Node(3),))]
    plan = plan_attention(Tree.of(roots, prefix_tokens=9), window=None)
    first = 50 + 3 * questions
    assert plan.ancestors == (
        Call(0, first + 23, 0, 9, from_prefix=True),
        Call(50, first, 0, 50),
        Call(first + 20, first + 23, first, first + 20),
    )


@pytest.mark.parametrize("window", [4, 16])
def test_a_window_bounds_the_keys_of_a_long_document(window: int) -> None:
    tree = Tree.of([Node(400)], prefix_tokens=0)
    plan = plan_attention(tree, window=window)
    work = sum(
        (call.query_stop - call.query_start) * (call.key_stop - call.key_start)
        for call in plan.selves
    )
    assert work <= 400 * 2 * window
