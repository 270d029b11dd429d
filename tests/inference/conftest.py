"""Random trees of any depth, and the definition of what their rows see."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from pipeline.inference.tree import Node, Tree

Key = tuple[str, int]  # ("prefix", its number) or ("row", its number)


@dataclass(frozen=True)
class Grown:
    """A tree, and for each row the keys from the root down to the row itself."""

    roots: tuple[Node, ...]
    tree: Tree
    paths: tuple[tuple[Key, ...], ...]

    def seen(self, row: int, window: int | None) -> tuple[Key, ...]:
        """The definition: a row sees its path, or only the last `window` keys of it."""
        return self.paths[row] if window is None else self.paths[row][-window:]


def _node(source: random.Random, depth: int) -> Node:
    children = source.randint(0, 3) if depth else 0
    return Node(source.randint(1, 12), tuple(_node(source, depth - 1) for _ in range(children)))


def _paths(nodes: Sequence[Node], path: tuple[Key, ...], first: int) -> Iterator[tuple[Key, ...]]:
    for node in nodes:
        below = path
        for row in range(first, first + node.tokens):
            below = (*below, ("row", row))
            yield below
        rest = list(_paths(node.children, below, first + node.tokens))
        yield from rest
        first += node.tokens + len(rest)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Toys are too small to share out: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def grow() -> Callable[..., Grown]:
    def grow(seed: int, *, prefix_tokens: int = 0, depth: int = 3) -> Grown:
        source = random.Random(seed)
        roots = tuple(_node(source, depth) for _ in range(source.randint(1, 3)))
        prefix: tuple[Key, ...] = tuple(("prefix", i) for i in range(prefix_tokens))
        tree = Tree.of(roots, prefix_tokens=prefix_tokens)
        return Grown(roots, tree, tuple(_paths(roots, prefix, 0)))

    return grow
