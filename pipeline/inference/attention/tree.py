"""The tree of a batch: documents below a kept prefix, and the same branches below each document.

    prefix (kept)  ──  document 0  ──┬── question 0
                                     └── question 1
                   ──  document 1  ──┬── question 0 ...

Entry points: `Branches` finds the prefixes that sequences share, `Tree` numbers the rows. A batch
is packed: documents first, then one copy of the branches for each of them, in depth-first order:

    rows   | document 0 | document 1 | q0 | q1 | q0 | q1 |
    below                              document 0  document 1

All copies have the same layout.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

import numpy as np
from numpy.typing import NDArray

# Tokens that a shared prefix must save: the rows below it are gathered with it.
LEAST_SAVED = 4


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of a token sequence that branches share, the same in every copy of the branches."""

    start: int  # counted from the copy's first row
    stop: int
    subtree_stop: int  # where its last descendant's rows end
    position: int  # of its first token, counted from the document's end


@dataclass(frozen=True, slots=True)
class Branches:
    """Sequences as paths of a tree that share prefixes, packed in depth-first order.

    Branches.of([(1, 2, 3, 4, 5), (1, 2, 3, 4, 6)]).token_ids -> (1, 2, 3, 4, 5, 6)
    """

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]  # each followed by its descendants
    ends: tuple[int, ...]  # the row of each sequence's last token, in the given order

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> Branches:
        """The branches of nonempty sequences. A prefix of another ends within the other's rows."""
        tuples = [tuple(sequence) for sequence in sequences]
        ascending = [*sorted(set(tuples)), ()]
        leaves = [s for s, after in pairwise(ascending) if after[: len(s)] != s]
        token_ids: list[int] = []
        rows: list[list[int]] = [[] for _ in leaves]
        spans = _pack(list(enumerate(leaves)), token_ids, rows, position=0)
        # — the first leaf not below a sequence is the one that begins with it
        ends = (rows[bisect_left(leaves, s)][len(s) - 1] for s in tuples)
        return cls(tuple(token_ids), tuple(spans), tuple(ends))


_Unpacked = list[tuple[int, tuple[int, ...]]]  # a leaf's number, and what is left of its tokens


def _pack(
    unpacked: _Unpacked, token_ids: list[int], rows: Sequence[list[int]], *, position: int
) -> list[Span]:
    """Append the leaves' tokens to `token_ids`, and the rows of each leaf to its list."""
    spans: list[Span] = []
    for group in _groups(unpacked, known=0):
        prefix = _common_prefix(group)
        start, stop = len(token_ids), len(token_ids) + len(prefix)
        token_ids += prefix
        for leaf, _ in group:
            rows[leaf] += range(start, stop)
        rest = [(leaf, ids[len(prefix) :]) for leaf, ids in group if len(ids) > len(prefix)]
        descendants = _pack(rest, token_ids, rows, position=position + len(prefix))
        spans += [Span(start, stop, len(token_ids), position), *descendants]
    return spans


def _groups(unpacked: _Unpacked, *, known: int) -> list[_Unpacked]:
    """Groups that save `LEAST_SAVED` tokens, of leaves whose first `known` tokens are equal."""
    by_next: dict[tuple[int, ...], _Unpacked] = {}
    for leaf, rest in unpacked:
        by_next.setdefault(rest[known : known + 1], []).append((leaf, rest))
    groups: list[_Unpacked] = []
    for group in by_next.values():
        shared = len(_common_prefix(group))
        if len(group) == 1 or shared * (len(group) - 1) >= LEAST_SAVED:
            groups.append(group)
        else:
            groups += _groups(group, known=shared)
    return groups


def _common_prefix(group: _Unpacked) -> tuple[int, ...]:
    """What the smallest and the largest leaf share in lexical order, all others share too."""
    smallest, largest = min(rest for _, rest in group), max(rest for _, rest in group)
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(smallest, largest, strict=False))
    return tuple(token for token, _ in pairs)


class Tree:
    """A batch of documents below `prefix_tokens` kept tokens, with the same spans below each.

    Tree((3, 1), Branches.of([(1, 2), (3,)]).spans, prefix_tokens=5).positions.tolist()
    -> [5, 6, 7, 5, 8, 9, 8, 6, 7, 6]
    """

    def __init__(self, documents: Sequence[int], spans: Sequence[Span], prefix_tokens: int) -> None:
        """`documents` are the tokens of each."""
        self.documents, self.spans = np.array(documents, np.int64), spans
        self.prefix_tokens = prefix_tokens
        self.document_rows = int(self.documents.sum())
        self.branch_rows = spans[-1].stop if spans else 0  # of one copy of the branches
        self.tokens = self.document_rows + len(documents) * self.branch_rows
        # [docs]: the first row of each document, and of its copy of the branches
        self.document_starts = self.documents.cumsum() - self.documents
        self.branch_starts = self.document_rows + self.branch_rows * np.arange(len(documents))
        by_span = [(s.position - s.start, s.subtree_stop) for s in spans]
        of_rows = np.repeat(
            np.array(by_span, np.int64).reshape(-1, 2), [s.stop - s.start for s in spans], axis=0
        )  # [branch rows, 2]
        in_document = np.arange(self.document_rows) - np.repeat(
            self.document_starts, self.documents
        )
        below = np.arange(self.branch_rows) + of_rows[:, 0]
        copies = np.add.outer(self.documents, below).ravel()
        # [tokens]: the position of every row, counted from the root
        self.positions = np.concatenate([in_document, copies]) + prefix_tokens
        stops = np.add.outer(self.branch_starts, of_rows[:, 1]).ravel()
        # [tokens]: where the rows below this one end
        self.subtree_stops = np.concatenate([np.full(self.document_rows, self.tokens), stops])
        top = [span for span in spans if span.position == 0]
        # [branch rows]: where the span begins that is below the document
        self.top_starts = np.repeat(
            np.array([s.start for s in top], np.int64), [s.subtree_stop - s.start for s in top]
        )

    def rows_at(self, ends: Sequence[int]) -> NDArray[np.int64]:  # [docs * ends]
        """These rows of every copy of the branches, document by document."""
        return np.add.outer(self.branch_starts, np.array(ends, np.int64)).ravel()
