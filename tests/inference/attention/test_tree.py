"""Rows and positions are those of the paths; branches hold every sequence and waste no token."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st
from random_trees import DefinedTree, Node, defined_trees, tree_of

from pipeline.inference.attention.tree import LEAST_SAVED, Branches


def test_a_tree_without_documents_has_no_tokens() -> None:
    tree = tree_of([], [Node(2)], prefix_tokens=3)
    assert (tree.tokens, tree.positions.tolist()) == (0, [])


@given(defined_trees())
def test_rows_positions_and_spans_are_those_of_the_paths(defined: DefinedTree) -> None:
    tree, row = defined.tree, 0
    assert tree.tokens == len(defined.paths)
    assert tree.positions.tolist() == [len(path) - 1 for path in defined.paths]
    first = tree.branch_starts.tolist()[-1]  # of the last copy
    for span in tree.spans:  # they are consecutive, each followed by its descendants
        assert span.start == row
        row = span.stop
        last = ("row", first + span.stop - 1)
        descendants = [r - first for r, path in enumerate(defined.paths) if last in path[:-1]]
        assert descendants == list(range(span.stop, span.subtree_stop))


def path_to(branches: Branches, end: int) -> list[int]:
    """The tokens from the root down to a row, read from the layout of the nodes."""
    above = [s for s in branches.spans if s.start <= end < s.subtree_stop]
    return [branches.token_ids[row] for s in above for row in range(s.start, min(s.stop, end + 1))]


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@given(st.lists(TOKENS, max_size=6), st.data())
def test_every_sequence_is_a_path_and_no_token_is_added(
    prefixes: list[list[int]], data: st.DataObject
) -> None:
    shared = st.sampled_from([[], *prefixes])
    sequence = st.tuples(shared, shared, TOKENS).map(lambda parts: [*chain(*parts)])
    sequences = data.draw(st.lists(sequence, max_size=9))
    branches = Branches.of(sequences)
    assert [path_to(branches, end) for end in branches.ends] == sequences
    assert len(branches.token_ids) <= sum(map(len, sequences))


def test_a_prefix_that_saves_too_little_is_not_shared() -> None:
    prefix = tuple(range(LEAST_SAVED - 1))
    branches = Branches.of([(*prefix, 7), (*prefix, 8)])
    assert branches.token_ids == (*prefix, 7, *prefix, 8)


def test_two_that_share_more_than_all_share_what_saves_enough() -> None:
    branches = Branches.of([(1, 2, 3, 4, 5, 6), (1, 9), (1, 2, 3, 4, 5, 7)])
    assert branches.token_ids == (1, 2, 3, 4, 5, 6, 7, 1, 9)
    assert branches.ends == (5, 8, 6)
