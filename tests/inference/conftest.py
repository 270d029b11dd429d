"""Random trees of any depth, and the definition of what their rows see."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from pipeline.inference.attention.tree import Node, Tree

Key = tuple[str, int]  # ("prefix", its number) or ("row", its number)
Path = tuple[Key, ...]


@dataclass(frozen=True)
class Grown:
    """A tree, and for each row the keys from the root down to the row itself."""

    branches: tuple[Node, ...]
    tree: Tree
    paths: tuple[Path, ...]

    def seen(self, row: int, window: int | None) -> Path:
        """The definition: a row sees its path, or only the last `window` keys of it."""
        return self.paths[row] if window is None else self.paths[row][-window:]


def _node(source: random.Random, depth: int) -> Node:
    children = source.randint(0, 3) if depth else 0
    return Node(source.randint(1, 12), tuple(_node(source, depth - 1) for _ in range(children)))


def _paths(nodes: Sequence[Node], path: Path, first: int) -> Iterator[Path]:
    for node in nodes:
        below = path
        for row in range(first, first + node.tokens):
            below = (*below, ("row", row))
            yield below
        rest = list(_paths(node.children, below, first + node.tokens))
        yield from rest
        first += node.tokens + len(rest)


def paths_of(documents: Sequence[int], branches: Sequence[Node], prefix: Path) -> list[Path]:
    """Documents first, one behind the other, then each one's copy of the branches."""
    alone = [Node(tokens) for tokens in documents]
    found = list(_paths(alone, (), 0))
    found = [(*prefix, *_since_document(path, documents)) for path in found]
    first, below = sum(documents), []
    for start, tokens in zip(_starts(documents), documents, strict=True):
        document: Path = tuple(("row", row) for row in range(start, start + tokens))
        copy = list(_paths(branches, (*prefix, *document), first))
        below += copy
        first += len(copy)
    return [*found, *below]


def _starts(documents: Sequence[int]) -> list[int]:
    return [sum(documents[:i]) for i in range(len(documents))]


def _since_document(path: Path, documents: Sequence[int]) -> Path:
    row = path[-1][1]
    start = max(start for start in _starts(documents) if start <= row)
    return tuple(key for key in path if key[1] >= start)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Toys are too small to share out: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def grow() -> Callable[..., Grown]:
    def grow(seed: int, *, prefix_tokens: int = 0, depth: int = 2) -> Grown:
        source = random.Random(seed)
        documents = [source.randint(1, 14) for _ in range(source.randint(1, 3))]
        branches = tuple(_node(source, depth) for _ in range(source.randint(0, 3)))
        prefix: Path = tuple(("prefix", i) for i in range(prefix_tokens))
        tree = Tree.of(documents, branches, prefix_tokens=prefix_tokens)
        return Grown(branches, tree, tuple(paths_of(documents, branches, prefix)))

    return grow
