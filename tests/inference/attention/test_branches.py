"""Branches hold every sequence as a path, and never more tokens than the sequences alone."""

from __future__ import annotations

import random

import pytest

from pipeline.inference.attention.tree import LEAST_SAVED, Branches, Tree


def path_to(branches: Branches, end: int) -> list[int]:
    """The tokens from the root down to a row, read off the layout of the nodes."""
    spans = Tree.of([1], branches.nodes, prefix_tokens=0).spans
    above = [s for s in spans if s.start <= end < s.subtree_stop]
    return [branches.token_ids[row] for s in above for row in range(s.start, min(s.stop, end + 1))]


def some_sequences(seed: int) -> list[list[int]]:
    source = random.Random(seed)
    prefixes: list[list[int]] = [[]]
    for _ in range(source.randint(0, 5)):
        prefix = source.choice(prefixes)
        prefixes.append([*prefix, *source.choices(range(3), k=source.randint(1, 9))])
    sequences = [
        [*source.choice(prefixes), *source.choices(range(3), k=source.randint(0, 5))]
        for _ in range(source.randint(1, 9))
    ]
    return [sequence or [0] for sequence in sequences]


@pytest.mark.parametrize("seed", range(200))
def test_every_sequence_is_a_path(seed: int) -> None:
    sequences = some_sequences(seed)
    branches = Branches.of(sequences)
    assert [path_to(branches, end) for end in branches.ends] == sequences
    assert len(branches.token_ids) <= sum(map(len, sequences))


def test_the_example_of_the_docstring() -> None:
    branches = Branches.of([(1, 2, 3, 4, 5), (1, 2, 3, 4, 6)])
    assert branches.token_ids == (1, 2, 3, 4, 5, 6)
    assert branches.ends == (4, 5)


def test_a_prefix_that_saves_too_little_is_not_shared() -> None:
    prefix = tuple(range(LEAST_SAVED - 1))
    branches = Branches.of([(*prefix, 7), (*prefix, 8)])
    assert branches.token_ids == (*prefix, 7, *prefix, 8)


def test_two_that_share_more_than_all_do_share_what_pays() -> None:
    branches = Branches.of([(1, 2, 3, 4, 5, 6), (1, 9), (1, 2, 3, 4, 5, 7)])
    assert branches.token_ids == (1, 2, 3, 4, 5, 6, 7, 1, 9)
    assert branches.ends == (5, 8, 6)


def test_equal_sequences_share_all_their_rows() -> None:
    branches = Branches.of([(1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4, 5)])
    assert branches.token_ids == (1, 2, 3, 4, 5) and branches.ends == (3, 3, 4)


def test_no_sequences_have_no_rows() -> None:
    assert Branches.of([]) == Branches((), (), ())
