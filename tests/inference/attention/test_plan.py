"""The plan of a tree is its definition: every query meets every key it should, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from random_trees import DefinedTree, Node, defined_trees, tree_of

from pipeline.inference.attention.plan import (
    AttentionPlan,
    Range,
    Segment,
    plan_attention,
)


def rows_of(rows: Range, copy: int) -> range:
    start = rows.start + copy * rows.stride
    return range(start, start + rows.tokens)


def pairs(segment: Segment) -> Iterator[tuple[int, tuple[str, int]]]:
    """The (query, key) pairs of one segment, read from the segment's own description."""
    source = "prefix" if segment.from_prefix else "row"
    assert segment.queries.copies == segment.keys.copies
    for copy in range(segment.queries.copies):
        for i, query in enumerate(rows_of(segment.queries, copy)):
            for j, key in enumerate(rows_of(segment.keys, copy)):
                distance = segment.offset + i - j
                in_window = segment.window is None or distance < segment.window
                if in_window and not (segment.causal and distance < 0):
                    yield query, (source, key)


def segments(plan: AttentionPlan) -> list[Segment]:
    return [segment for level in plan for segment in level]


def joined(plan: AttentionPlan) -> Counter[Any]:
    return Counter(pair for segment in segments(plan) for pair in pairs(segment))


@pytest.mark.parametrize("branches_only", [False, True])
@given(defined_trees())
def test_a_plan_joins_exactly_the_pairs_of_the_definition_each_once(
    branches_only: bool, defined: DefinedTree
) -> None:
    tree = defined.tree
    first = tree.document_rows if branches_only else 0
    rows = range(first, tree.tokens)
    expected = Counter((row - first, key) for row in rows for key in defined.seen(row))
    plan = plan_attention(tree, window=defined.window, branches_only=branches_only)
    assert joined(plan) == expected


@given(defined_trees(prefix_tokens=4))
def test_the_first_level_holds_every_row_and_shows_it_itself_no_level_holds_one_twice(
    defined: DefinedTree,
) -> None:
    tree = defined.tree
    plan = plan_attention(tree, window=defined.window)
    for level in plan:
        queries = Counter(
            row
            for segment in level
            for copy in range(segment.queries.copies)
            for row in rows_of(segment.queries, copy)
        )
        assert set(queries.values()) == {1}
    shown = {query for segment in plan[0] for query, key in pairs(segment) if key[1] == query}
    assert shown == set(range(tree.tokens))


@given(defined_trees(prefix_tokens=4))
def test_no_segment_carries_a_blind_query_or_an_unseen_key(defined: DefinedTree) -> None:
    planned = segments(plan_attention(defined.tree, window=defined.window))
    assert planned
    for segment in planned:
        met = list(pairs(segment))
        assert len({query for query, _ in met}) == segment.queries.tokens * segment.queries.copies
        assert len({key for _, key in met}) == segment.keys.tokens * segment.keys.copies


@pytest.mark.parametrize("questions", [1, 2, 32])
@pytest.mark.parametrize("documents", [1, 3])
def test_a_documents_keys_are_read_once_and_a_question_is_one_segment_for_all_documents(
    documents: int, questions: int
) -> None:
    tree = tree_of([50, 20, 7][:documents], [Node(3)] * questions, prefix_tokens=9)
    own, prefix, *rest = plan_attention(tree, window=None)
    assert len(own) == documents + questions and len(prefix) == 1
    assert [len(level) for level in rest] == [documents]
