"""The tree of a batch: which packed tokens attend to which.

    prefix (kept)  ──  document 0  ──┬── question 0
                                     └── question 1
                   ──  document 1  ──┬── question 0 ...

Tokens are packed depth first, so a span's descendants lie right behind it:

    rows   | document 0 | q0 | q1 | document 1 | q0 | q1 |
    keys     ^ seen by    q0   q1   and by nobody else

Knows row numbers, lengths and positions. Knows nothing of tokens, tensors or models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Span:
    """One node of the tree: consecutive rows of the packed batch."""

    start: int
    stop: int
    subtree_stop: int  # where its last descendant's rows end
    position: int  # of its first token, counted from the root

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Node:
    """A span before it is laid out: its length and its children."""

    tokens: int
    children: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Tree:
    """The spans of a batch in row order, below a prefix of `prefix_tokens` kept tokens.

    Tree.of([Node(3, (Node(2), Node(2)))], prefix_tokens=5).positions
    -> [5, 6, 7, 8, 9, 8, 9]
    """

    spans: tuple[Span, ...]
    prefix_tokens: int

    @classmethod
    def of(cls, roots: Sequence[Node], *, prefix_tokens: int) -> Tree:
        return cls(tuple(_lay_out(roots, start=0, position=prefix_tokens)), prefix_tokens)

    @property
    def tokens(self) -> int:
        return self.spans[-1].stop if self.spans else 0

    @property
    def positions(self) -> list[int]:
        """The position of every row, counted from the root."""
        return [span.position + i for span in self.spans for i in range(span.tokens)]

    @property
    def leaf_rows(self) -> list[int]:
        """The last row of every span without children, in row order."""
        return [span.stop - 1 for span in self.spans if span.subtree_stop == span.stop]


def _lay_out(nodes: Sequence[Node], *, start: int, position: int) -> Iterator[Span]:
    for node in nodes:
        below = list(
            _lay_out(node.children, start=start + node.tokens, position=position + node.tokens)
        )
        stop = start + node.tokens
        subtree_stop = below[-1].subtree_stop if below else stop
        yield Span(start=start, stop=stop, subtree_stop=subtree_stop, position=position)
        yield from below
        start = subtree_stop


@dataclass(frozen=True, slots=True)
class Call:
    """One attention call: consecutive query rows over consecutive keys.

    `causal`: query i sees keys 0..i. `window`: a query sees only keys less than that many
    positions before it, and none after it; `None` where no key has to be hidden.
    """

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    from_prefix: bool = False  # keys of the kept prefix, not of this batch
    causal: bool = False
    window: int | None = None
    query_position: int = 0  # of the first query; used with `window` only
    key_position: int = 0


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The calls that make up one layer's attention.

    `selves` covers every row exactly once, in row order; `ancestors` are merged into it.
    """

    selves: tuple[Call, ...]
    ancestors: tuple[Call, ...]


def plan_attention(tree: Tree, *, window: int | None) -> AttentionPlan:
    """The calls for layers that see `window` positions back, or everything."""
    selves = [call for span in tree.spans for call in _self_calls(span, window)]
    ancestors = [call for call in _prefix_calls(tree, window) if call.key_stop > call.key_start]
    for index, span in enumerate(tree.spans):
        ancestors += _descendant_calls(tree, index, span, window)
    return AttentionPlan(tuple(selves), tuple(ancestors))


def _self_calls(span: Span, window: int | None) -> Iterator[Call]:
    if window is None or span.tokens <= window:
        yield Call(span.start, span.stop, span.start, span.stop, causal=True)
        return
    for first, last in _blocks(span.tokens, window):
        hidden = max(0, first - window + 1)  # keys that even the first query no longer sees
        yield Call(
            span.start + first,
            span.start + last,
            span.start + hidden,
            span.start + last,
            window=window,
            query_position=span.position + first,
            key_position=span.position + hidden,
        )


def _prefix_calls(tree: Tree, window: int | None) -> Iterator[Call]:
    if not tree.prefix_tokens:
        return
    farthest = max(span.position + span.tokens - 1 for span in tree.spans)
    if window is None or farthest < window:
        yield Call(0, tree.tokens, 0, tree.prefix_tokens, from_prefix=True)
        return
    for span in tree.spans:
        yield from _windowed(
            span,
            key_start=0,
            key_tokens=tree.prefix_tokens,
            key_position=0,
            window=window,
            from_prefix=True,
        )


def _descendant_calls(tree: Tree, index: int, span: Span, window: int | None) -> Iterator[Call]:
    if span.subtree_stop == span.stop:
        return
    below = [other for other in tree.spans[index + 1 :] if other.start < span.subtree_stop]
    farthest = max(other.position + other.tokens - 1 for other in below)
    if window is None or farthest - span.position < window:
        yield Call(span.stop, span.subtree_stop, span.start, span.stop)
        return
    for other in below:
        yield from _windowed(
            other,
            key_start=span.start,
            key_tokens=span.tokens,
            key_position=span.position,
            window=window,
            from_prefix=False,
        )


def _windowed(
    queries: Span,
    *,
    key_start: int,
    key_tokens: int,
    key_position: int,
    window: int,
    from_prefix: bool,
) -> Iterator[Call]:
    """Calls for the queries that still see any of an ancestor's keys."""
    last_key = key_position + key_tokens - 1
    seeing = min(queries.tokens, last_key + window - queries.position)
    if seeing <= 0:
        return
    hidden = max(0, queries.position - window + 1 - key_position)
    farthest = queries.position + seeing - 1
    yield Call(
        queries.start,
        queries.start + seeing,
        key_start + hidden,
        key_start + key_tokens,
        from_prefix=from_prefix,
        window=window if farthest - (key_position + hidden) >= window else None,
        query_position=queries.position,
        key_position=key_position + hidden,
    )


def _blocks(tokens: int, size: int) -> Iterator[tuple[int, int]]:
    yield from pairwise([*range(0, tokens, size), tokens])
