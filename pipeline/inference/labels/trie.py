"""The token paths of a question's labels, as a trie.

Entry point: `LabelTrie.of`. If first tokens alone are scored, the trie has depth 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LabelTrie:
    """The verbalizers of labels; nodes are numbered breadth first, and 0 is the root.

    LabelTrie.of([[(1, 2), (1, 3)], [(4,)]]).token_ids -> (-1, 1, 4, 2, 3)
    """

    token_ids: tuple[int, ...]  # [nodes]: the token that leads to each; -1 for the root
    parents: tuple[int, ...]  # [nodes]: -1 for the root; never falling
    depths: tuple[int, ...]  # [nodes]: tokens from the root
    first_children: tuple[int, ...]  # [nodes + 1]: children of node n: from entry n to before n + 1
    inner: tuple[int, ...]  # the nodes with children, where a hidden state is needed
    ends: tuple[tuple[int, int], ...]  # of each verbalizer: its last node and its label's number
    labels: int
    length_penalty: float = 0.0

    @classmethod
    def of(cls, labels: Sequence[Collection[Path]], *, length_penalty: float = 0.0) -> LabelTrie:
        """The trie of each label's verbalizers.

        A verbalizer that continues another one of its label is left out: the probability of the
        shorter one includes it.
        """
        paths = sorted((path, i) for i, own in enumerate(labels) for path in _shortest(own))
        token_ids, parents, depths, ends = [-1], [-1], [0], []
        waiting = deque([(0, 0, len(paths))])  # a node, and the range of paths through it
        while waiting:
            node, start, stop = waiting.popleft()
            depth = depths[node]
            while start < stop and len(paths[start][0]) == depth:
                ends.append((node, paths[start][1]))
                start += 1
            for token_id, group in groupby(range(start, stop), lambda i: paths[i][0][depth]):  # noqa: B023
                through = list(group)
                waiting.append((len(token_ids), through[0], through[-1] + 1))
                token_ids.append(token_id)
                parents.append(node)
                depths.append(depth + 1)
        return cls(
            tuple(token_ids),
            tuple(parents),
            tuple(depths),
            # — breadth first, the children of a node are neighbours, in the order of the parents
            (1, *(1 + np.bincount(parents[1:], minlength=len(parents)).cumsum()).tolist()),
            tuple(sorted(set(parents[1:]))),
            tuple(ends),
            len(labels),
            length_penalty,
        )

    @property
    def ends_by_label(self) -> list[list[int]]:
        """The indices into `ends` of each label's verbalizers."""
        by_label: list[list[int]] = [[] for _ in range(self.labels)]
        for index, (_, label) in enumerate(self.ends):
            by_label[label].append(index)
        return by_label

    @property
    def length_divisors(self) -> NDArray[np.float32]:  # [verbalizers]
        """The divisor of each verbalizer's sum: 1 without a length penalty."""
        tokens = np.array([self.depths[end] for end, _ in self.ends], dtype=np.float64)
        return np.asarray(tokens**self.length_penalty, dtype=np.float32)

    @property
    def verbalizers(self) -> list[list[Path]]:
        """The token paths of each label's verbalizers."""
        return [[self.path(self.ends[i][0]) for i in own] for own in self.ends_by_label]

    def children(self, node: int) -> range:
        return range(self.first_children[node], self.first_children[node + 1])

    def tokens_after(self, node: int) -> tuple[int, ...]:
        """The tokens that lead to the children."""
        return self.token_ids[self.first_children[node] : self.first_children[node + 1]]

    def nodes_to(self, node: int) -> list[int]:
        """The nodes from below the root to the node itself."""
        nodes = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path(self, node: int) -> Path:
        """The tokens from the root to the node."""
        return tuple(self.token_ids[each] for each in self.nodes_to(node))

    def chain(self, node: int) -> list[int]:
        """The node and its only descendants, to where the trie branches or a path ends."""
        nodes = [node]
        while len(below := self.children(nodes[-1])) == 1 and self.children(below[0]):
            nodes.append(below[0])
        return nodes


def _shortest(paths: Collection[Path]) -> list[Path]:
    """The paths that continue no other one."""
    shortest: list[Path] = []
    for path in sorted(paths):
        if not shortest or path[: len(shortest[-1])] != shortest[-1]:
            shortest.append(path)
    return shortest
