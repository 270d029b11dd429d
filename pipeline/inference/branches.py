"""The questions below a document as one tree: what several begin with is read once.

Knows token ids. Knows nothing of documents, text or models.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.inference.tree import Node

# Tokens that a shared opening must save: it costs an attention call in every layer.
LEAST_SAVED = 4


@dataclass(frozen=True, slots=True)
class Branches:
    """Sequences that share their openings, packed depth first.

    Branches.of([(1, 2, 3, 4, 5), (1, 2, 3, 4, 6)]).token_ids -> (1, 2, 3, 4, 5, 6)
    """

    token_ids: tuple[int, ...]
    nodes: tuple[Node, ...]
    ends: tuple[int, ...]  # the row of each sequence's last token, in the given order

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> Branches:
        """Of sequences of one token at least; one that begins another ends within its rows."""
        wanted = [tuple(sequence) for sequence in sequences]
        longest = _longest(wanted)
        token_ids: list[int] = []
        rows: list[list[int]] = [[] for _ in longest]
        nodes = _grow(list(enumerate(longest)), token_ids, rows)
        # — the least that is not below a sequence begins with it, if any does
        ends = (rows[bisect_left(longest, s)][len(s) - 1] for s in wanted)
        return cls(tuple(token_ids), nodes, tuple(ends))


_Waiting = list[tuple[int, tuple[int, ...]]]  # a sequence's place, and what is left of it


def _longest(sequences: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those that begin no other, rising."""
    rising = sorted(set(sequences))
    return [s for s, after in pairwise([*rising, ()]) if after[: len(s)] != s]


def _grow(waiting: _Waiting, token_ids: list[int], rows: Sequence[list[int]]) -> tuple[Node, ...]:
    """Lay the sequences out behind `token_ids`, and note the rows of each."""
    nodes = []
    for group in _sharing(waiting, known=0):
        opening = _opening(group)
        laid_out = range(len(token_ids), len(token_ids) + len(opening))
        token_ids += opening
        for place, _ in group:
            rows[place] += laid_out
        below = [(p, rest[len(opening) :]) for p, rest in group if len(rest) > len(opening)]
        nodes.append(Node(len(opening), _grow(below, token_ids, rows)))
    return tuple(nodes)


def _sharing(waiting: _Waiting, *, known: int) -> list[_Waiting]:
    """Groups whose common opening pays, all of whose first `known` tokens are alike."""
    by_next: dict[tuple[int, ...], _Waiting] = {}
    for place, rest in waiting:
        by_next.setdefault(rest[known : known + 1], []).append((place, rest))
    groups: list[_Waiting] = []
    for group in by_next.values():
        shared = len(_opening(group))
        if len(group) == 1 or shared * (len(group) - 1) >= LEAST_SAVED:
            groups.append(group)
        else:
            groups += _sharing(group, known=shared)
    return groups


def _opening(group: _Waiting) -> tuple[int, ...]:
    """The tokens that all begin with: those that the least and the greatest of them do."""
    least, greatest = min(rest for _, rest in group), max(rest for _, rest in group)
    pairs = enumerate(zip(least, greatest, strict=False))
    differs = next((i for i, (a, b) in pairs if a != b), min(len(least), len(greatest)))
    return least[:differs]
