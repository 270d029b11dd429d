"""The tree of a batch: documents below a kept prefix, and the same branches below each document.

    prefix (kept)  ──  document 0  ──┬── question 0
                                     └── question 1
                   ──  document 1  ──┬── question 0 ...

Documents are packed first, then one copy of the branches for each of them, depth first:

    rows   | document 0 | document 1 | q0 | q1 | q0 | q1 |
    below                              document 0  document 1

Copies are alike, so a call over question 0 takes those of all documents at once. Knows row
numbers, lengths and positions. Knows nothing of tokens, tensors or models.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Node:
    """A branch before it is laid out: its length and its children."""

    tokens: int
    children: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """One node of the branches: consecutive rows of every copy of them."""

    start: int  # counted from the copy's first row
    stop: int
    subtree_stop: int  # where its last descendant's rows end
    position: int  # of its first token, counted from the document's end

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Tree:
    """A batch of documents below `prefix_tokens` kept tokens, with the same spans below each.

    Tree.of([3, 1], [Node(2), Node(1)], prefix_tokens=5).positions.tolist()
    -> [5, 6, 7, 5, 8, 9, 8, 6, 7, 6]
    """

    documents: tuple[int, ...]  # tokens of each
    spans: tuple[Span, ...]
    prefix_tokens: int

    @classmethod
    def of(
        cls, documents: Sequence[int], branches: Sequence[Node] = (), *, prefix_tokens: int
    ) -> Tree:
        spans = tuple(_lay_out(branches, start=0, position=0))
        return cls(tuple(documents), spans, prefix_tokens)

    @property
    def document_rows(self) -> int:
        return sum(self.documents)

    @property
    def branch_rows(self) -> int:
        """Rows of one copy of the branches."""
        return self.spans[-1].stop if self.spans else 0

    @property
    def tokens(self) -> int:
        return self.document_rows + len(self.documents) * self.branch_rows

    @property
    def document_starts(self) -> list[int]:
        """The first row of each document."""
        return [0, *accumulate(self.documents)][: len(self.documents)]

    def branch_start(self, document: int) -> int:
        """The first row of a document's copy of the branches."""
        return self.document_rows + document * self.branch_rows

    @property
    def positions(self) -> NDArray[np.int64]:  # [tokens]
        """The position of every row, counted from the root."""
        lengths = np.array(self.documents, dtype=np.int64)
        starts = np.array(self.document_starts, dtype=np.int64)
        read = np.arange(self.document_rows) - np.repeat(starts, lengths)
        rows = np.arange(self.branch_rows)
        shifts = [span.position - span.start for span in self.spans]
        below = rows + np.repeat(shifts, [span.tokens for span in self.spans]).astype(np.int64)
        copies = np.add.outer(lengths, below)  # [docs, branch rows]
        return np.concatenate([read, copies.ravel()]) + self.prefix_tokens

    def rows_at(self, ends: Sequence[int]) -> NDArray[np.int64]:  # [docs * ends]
        """These rows of every copy of the branches, document by document."""
        firsts = [self.branch_start(document) for document in range(len(self.documents))]
        return np.add.outer(np.array(firsts, np.int64), np.array(ends, np.int64)).ravel()

    def rows_of(self, documents: Sequence[int]) -> NDArray[np.int64]:
        """The rows of these documents and of their branches, as the tree of them alone has them."""
        starts = self.document_starts
        read = [np.arange(starts[d], starts[d] + self.documents[d]) for d in documents]
        firsts = [self.branch_start(document) for document in documents]
        below = np.add.outer(np.array(firsts, np.int64), np.arange(self.branch_rows))
        return np.concatenate([np.arange(0), *read, below.ravel()])

    def only(self, documents: Sequence[int]) -> Tree:
        """The tree of these documents alone."""
        return replace(self, documents=tuple(self.documents[d] for d in documents))

    def cut_behind(self, ends: Sequence[int]) -> Tree:
        """The same rows, with a span's end behind each of these rows of a copy."""
        spans = (piece for span in self.spans for piece in _cut(span, ends))
        return replace(self, spans=tuple(spans))

    @property
    def depth(self) -> int:
        """Tokens of the longest path through the branches."""
        return max((span.position + span.tokens for span in self.spans), default=0)


def _lay_out(nodes: Sequence[Node], *, start: int, position: int) -> Iterator[Span]:
    for node in nodes:
        stop = start + node.tokens
        below = list(_lay_out(node.children, start=stop, position=position + node.tokens))
        subtree_stop = below[-1].subtree_stop if below else stop
        yield Span(start=start, stop=stop, subtree_stop=subtree_stop, position=position)
        yield from below
        start = subtree_stop


def _cut(span: Span, ends: Sequence[int]) -> Iterator[Span]:
    """The span as a chain of spans; `ends` rise."""
    first, last = bisect_left(ends, span.start), bisect_left(ends, span.stop - 1)
    stops = [*(end + 1 for end in ends[first:last]), span.stop]
    for start, stop in pairwise([span.start, *stops]):
        yield replace(span, start=start, stop=stop, position=span.position + start - span.start)


# Tokens that a shared prefix must save: it costs an attention call in every layer.
LEAST_SAVED = 4


@dataclass(frozen=True, slots=True)
class Branches:
    """Sequences that share their prefixes, packed depth first.

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
        prefix = _prefix(group)
        laid_out = range(len(token_ids), len(token_ids) + len(prefix))
        token_ids += prefix
        for place, _ in group:
            rows[place] += laid_out
        below = [(p, rest[len(prefix) :]) for p, rest in group if len(rest) > len(prefix)]
        nodes.append(Node(len(prefix), _grow(below, token_ids, rows)))
    return tuple(nodes)


def _sharing(waiting: _Waiting, *, known: int) -> list[_Waiting]:
    """Groups whose common prefix pays, all of whose first `known` tokens are alike."""
    by_next: dict[tuple[int, ...], _Waiting] = {}
    for place, rest in waiting:
        by_next.setdefault(rest[known : known + 1], []).append((place, rest))
    groups: list[_Waiting] = []
    for group in by_next.values():
        shared = len(_prefix(group))
        if len(group) == 1 or shared * (len(group) - 1) >= LEAST_SAVED:
            groups.append(group)
        else:
            groups += _sharing(group, known=shared)
    return groups


def _prefix(group: _Waiting) -> tuple[int, ...]:
    """The tokens that all begin with: those that the least and the greatest of them do."""
    least, greatest = min(rest for _, rest in group), max(rest for _, rest in group)
    pairs = enumerate(zip(least, greatest, strict=False))
    differs = next((i for i, (a, b) in pairs if a != b), min(len(least), len(greatest)))
    return least[:differs]
