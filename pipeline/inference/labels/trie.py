"""A question's labels in full: token paths that share their beginnings.

Knows token ids, and which label a path belongs to. Knows nothing of text, tensors or models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LabelTrie:
    """The verbalizers of labels; nodes are numbered breadth first, and 0 is the root.

    LabelTrie.of([[(1, 2), (1, 3)], [(4,)]]).token_ids -> (-1, 1, 4, 2, 3)
    """

    token_ids: tuple[int, ...]  # [nodes]: what leads to each; -1 for the root
    parents: tuple[int, ...]  # [nodes]: -1 for the root; never falling
    depths: tuple[int, ...]  # [nodes]: tokens from the root
    first_children: tuple[int, ...]  # [nodes + 1]: a node's children end where the next one's begin
    inner: tuple[int, ...]  # the nodes with children: a state is needed at each
    ends: tuple[tuple[int, int], ...]  # of each verbalizer: its last node, its label's number
    labels: int
    length_penalty: float = 0.0

    @classmethod
    def of(cls, labels: Sequence[Collection[Path]], *, length_penalty: float = 0.0) -> LabelTrie:
        """Of the verbalizers of each label; no two labels share one.

        A verbalizer that goes on from another of its own label adds nothing to it: an answer
        that begins with the longer begins with the shorter, which counts it.
        """
        owner = {path: n for n, verbalizers in enumerate(labels) for path in _shortest(verbalizers)}
        paths = sorted(owner)
        token_ids, parents, depths, ends = [-1], [-1], [0], []
        waiting = deque([(0, 0, len(paths))])  # a node, and the paths that go through it
        while waiting:
            node, start, stop = waiting.popleft()
            depth = depths[node]
            if start < stop and len(paths[start]) == depth:
                ends.append((node, owner[paths[start]]))
                start += 1
            for token_id, group in groupby(range(start, stop), lambda i: paths[i][depth]):  # noqa: B023
                places = list(group)
                waiting.append((len(token_ids), places[0], places[-1] + 1))
                token_ids.append(token_id)
                parents.append(node)
                depths.append(depth + 1)
        return cls(
            tuple(token_ids),
            tuple(parents),
            tuple(depths),
            _first_children(parents),
            tuple(sorted(set(parents[1:]))),
            tuple(ends),
            len(labels),
            length_penalty,
        )

    @property
    def deepest(self) -> int:
        """Tokens from the root to the deepest node at which a state is needed."""
        return max(self.depths) - 1

    @property
    def verbalizers(self) -> list[list[Path]]:
        """By label, its verbalizers."""
        found: list[list[Path]] = [[] for _ in range(self.labels)]
        for end, label in self.ends:
            found[label].append(self.path(end))
        return found

    def children(self, node: int) -> range:
        return range(self.first_children[node], self.first_children[node + 1])

    def path(self, node: int) -> Path:
        """The tokens from the root down to the node."""
        found = []
        while node:
            found.append(self.token_ids[node])
            node = self.parents[node]
        return tuple(reversed(found))

    def above(self, node: int) -> list[int]:
        """The nodes from below the root down to the node itself."""
        found = []
        while node:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def chain(self, node: int) -> list[int]:
        """The node, and what follows it for certain: up to where labels part or the path ends."""
        found = [node]
        while len(below := self.children(found[-1])) == 1 and self.children(below[0]):
            found.append(below[0])
        return found


def _shortest(verbalizers: Collection[Path]) -> list[Path]:
    """Without those that go on from another."""
    kept: list[Path] = []
    for path in sorted(verbalizers):
        if not kept or path[: len(kept[-1])] != kept[-1]:
            kept.append(path)
    return kept


def _first_children(parents: Sequence[int]) -> tuple[int, ...]:
    """Children stand together and in their parents' order, behind all of those of nodes before."""
    counts = [0] * len(parents)
    for parent in parents[1:]:
        counts[parent] += 1
    firsts = [1]
    for count in counts:
        firsts.append(firsts[-1] + count)
    return tuple(firsts)
