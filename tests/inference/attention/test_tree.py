"""The rows of a batch lie where the layout says, at the positions of their paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.inference.attention.tree import Node, Span, Tree

Grow = Callable[..., Any]

SEEDS = range(12)


def test_the_example_of_the_docstring() -> None:
    tree = Tree.of([3, 1], [Node(2), Node(1)], prefix_tokens=5)
    assert tree.positions.tolist() == [5, 6, 7, 5, 8, 9, 8, 6, 7, 6]
    assert tree.spans == (
        Span(start=0, stop=2, subtree_stop=2, position=0),
        Span(start=2, stop=3, subtree_stop=3, position=0),
    )
    assert (tree.document_rows, tree.branch_rows, tree.tokens) == (4, 3, 10)
    assert tree.branch_starts.tolist() == [4, 7]


def test_a_tree_without_documents_has_no_tokens() -> None:
    tree = Tree.of([], [Node(2)], prefix_tokens=3)
    assert (tree.tokens, tree.positions.tolist()) == (0, [])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("prefix_tokens", [0, 1, 7])
def test_a_position_counts_the_tokens_above(seed: int, prefix_tokens: int, grow: Grow) -> None:
    grown = grow(seed, prefix_tokens=prefix_tokens)
    assert grown.tree.tokens == len(grown.paths)
    assert grown.tree.positions.tolist() == [len(path) - 1 for path in grown.paths]


@pytest.mark.parametrize("seed", SEEDS)
def test_spans_lie_end_to_end_with_their_descendants_right_behind(seed: int, grow: Grow) -> None:
    grown = grow(seed)
    tree, row = grown.tree, 0
    first = tree.branch_starts.tolist()[-1]  # of the last copy
    for span in tree.spans:
        assert (span.start, span.stop) == (row, row + span.tokens)
        row = span.stop
        last = ("row", first + span.stop - 1)
        descendants = [r - first for r, path in enumerate(grown.paths) if last in path[:-1]]
        assert descendants == list(range(span.stop, span.subtree_stop))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_depth_is_the_longest_path_below_a_document(seed: int, grow: Grow) -> None:
    grown = grow(seed)
    longest = max(len(path) for path in grown.paths)
    assert grown.tree.depth + max(grown.tree.documents) == longest
