"""Random trees as a hypothesis strategy, and the definition of what their rows see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from pipeline.inference.attention.tree import Span, Tree

Key = tuple[str, int]  # ("prefix", its number) or ("row", its number)
Path = tuple[Key, ...]


@dataclass(frozen=True)
class Node:
    """A branch without row numbers: its length and its children."""

    tokens: int
    children: tuple[Node, ...] = ()


def tree_of(documents: Sequence[int], branches: Sequence[Node] = (), *, prefix_tokens: int) -> Tree:
    return Tree(tuple(documents), tuple(_spans(branches, start=0, position=0)), prefix_tokens)


def _spans(nodes: Sequence[Node], *, start: int, position: int) -> Iterator[Span]:
    for node in nodes:
        stop = start + node.tokens
        below = list(_spans(node.children, start=stop, position=position + node.tokens))
        subtree_stop = below[-1].subtree_stop if below else stop
        yield Span(start=start, stop=stop, subtree_stop=subtree_stop, position=position)
        yield from below
        start = subtree_stop


@dataclass(frozen=True)
class DefinedTree:
    """A tree, a window, and for each row the keys from the root down to the row itself."""

    branches: tuple[Node, ...]
    tree: Tree
    paths: tuple[Path, ...]
    window: int | None  # how many positions back a row sees; None: all

    def visible(self, row: int) -> Path:
        """The definition: a row sees its path, or only the last `window` keys of it."""
        return self.paths[row] if self.window is None else self.paths[row][-self.window :]


def _nodes(depth: int) -> Any:
    children = st.lists(_nodes(depth - 1), max_size=3) if depth else st.just([])
    return st.builds(Node, st.integers(1, 12), children.map(tuple))


@st.composite
def defined_trees(
    draw: Any, *, prefix_tokens: Any = None, min_branches: int = 0, most_tokens: int = 14
) -> DefinedTree:
    """Documents and a prefix have none or up to `most_tokens`; blocks of keys have 64."""
    documents = draw(st.lists(st.integers(0, most_tokens), min_size=1, max_size=3))
    branches = draw(st.lists(_nodes(2), min_size=min_branches, max_size=3))
    most_above = most_tokens if most_tokens > 64 else 9
    above = draw(st.integers(0, most_above) if prefix_tokens is None else st.just(prefix_tokens))
    tree = tree_of(documents, branches, prefix_tokens=above)
    depth = max((span.position + span.stop - span.start for span in tree.spans), default=0)
    # Windows that are just as long as a path, or not quite, are where a plan can be off by one.
    lengths = [n + depth for n in documents] + [above + n + depth for n in documents]
    lengths += [span.position + span.stop - span.start for span in tree.spans]
    edges = {max(1, length + shift) for length in lengths for shift in (-2, -1, 0, 1)}
    window = draw(st.none() | st.integers(1, most_tokens + 2) | st.sampled_from(sorted(edges)))
    paths = _defined_paths(documents, branches, above)
    return DefinedTree(tuple(branches), tree, tuple(paths), window)


def _defined_paths(
    documents: Sequence[int], branches: Sequence[Node], prefix_tokens: int
) -> list[Path]:
    """Documents first, one after the other, then each document's copy of the branches."""
    prefix: Path = tuple(("prefix", i) for i in range(prefix_tokens))
    paths: list[Path] = []
    ends = []
    for tokens in documents:
        own = list(_below([Node(tokens)], prefix, len(paths)))
        paths += own
        ends.append(own[-1] if own else prefix)
    for end in ends:
        paths += _below(branches, end, len(paths))
    return paths


def _below(nodes: Sequence[Node], above: Path, first: int) -> Iterator[Path]:
    for node in nodes:
        path = above
        for row in range(first, first + node.tokens):
            path = (*path, ("row", row))
            yield path
        rows_below = list(_below(node.children, path, first + node.tokens))
        yield from rows_below
        first += node.tokens + len(rows_below)
