"""Plan a layer's attention over a tree: which rows attend to which rows.

Entry points: `plan_attention` for a layer that is computed at every row, `plan_ends` for a layer
that is computed at a few rows only. A segment joins rows of queries and rows of keys; the segments
of later levels are merged by log-sum-exp into those of the first, which holds every row. So a
document's keys are read once for all its questions, as in Hydragen (Juravsky et al., 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.inference.attention.tree import Span, Tree


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows, and copies of them at equal distances."""

    start: int
    tokens: int
    copies: int = 1
    stride: int = 0  # rows from one copy to the next

    @property
    def stop(self) -> int:
        """Where the first copy ends."""
        return self.start + self.tokens

    def part(self, start: int, tokens: int) -> Rows:
        """`tokens` of these rows, from number `start` on, in every copy."""
        return Rows(self.start + start, tokens, self.copies, self.stride)


@dataclass(frozen=True, slots=True)
class Segment:
    """Attention of query rows over key rows, copy by copy.

    A query sees the keys up to its own position (`causal`), and only those less than `window`
    positions before it; None where the window hides no key. `offset` is the first query's position
    minus the first key's.
    """

    queries: Rows
    keys: Rows
    from_prefix: bool = False  # keys of the kept prefix, not of this batch
    causal: bool = False
    window: int | None = None
    offset: int = 0


Level = tuple[Segment, ...]  # no row is a query twice
# One layer's attention: the first level holds every row, the others are merged into it.
AttentionPlan = tuple[Level, ...]


def plan_attention(tree: Tree, *, window: int | None) -> AttentionPlan:
    """The segments for layers that see `window` positions back; None: all positions."""
    queries = tuple(_Queries(s.start, s.tokens, s.position, s.start) for s in tree.spans)
    layout = _Layout(tree, queries, tree.document_rows, tree.branch_rows)
    documents = _documents(tree)
    every_span = (*documents, *(layout.all_copies(q) for q in queries)) if documents else ()
    own = [
        Segment(r, r, causal=True, window=None if window is None or r.tokens <= window else window)
        for r in (placed.rows for placed in every_span)
    ]
    return _plan(own, layout, documents, window)


def plan_ends(tree: Tree, ends: Sequence[int], *, window: int | None) -> AttentionPlan:
    """The segments for a layer that is computed at the last rows of some spans only.

    `ends` are ascending rows of one copy. The query tensor has these rows only, document by
    document: row `document * len(ends) + i`. The keys are all of the tree's, in the tree's rows.
    """
    spans = {span.stop - 1: span for span in tree.spans}
    queries = tuple(
        _Queries(i, 1, spans[row].position + spans[row].tokens - 1, row)
        for i, row in enumerate(ends)
    )
    layout = _Layout(tree, queries, first=0, stride=len(ends))
    own = [
        segment
        for q in queries
        for segment in _in_window(layout.all_copies(q), _keys(tree, spans[q.row]), window)
    ]
    return _plan(own, layout, [], window)


def _plan(
    own: Sequence[Segment], layout: _Layout, documents: Sequence[_Placed], window: int | None
) -> AttentionPlan:
    """`documents` are those whose own rows are queries, before the rows of the branches."""
    over_spans = (_over_span(layout, span, window) for span in layout.tree.spans)
    above = (_over_prefix(layout, documents, window), _over_documents(layout, window), *over_spans)
    levels = (tuple(level) for level in (own, *above))
    return tuple(level for level in levels if level)


@dataclass(frozen=True, slots=True)
class _Placed:
    """Rows, and the position of the first of them."""

    rows: Rows
    position: int


@dataclass(frozen=True, slots=True)
class _Queries:
    """Query rows of each copy of the branches: a whole span, or the last row of one."""

    start: int  # counted from the first query row of the copy
    tokens: int
    position: int  # of the first, counted from the document's end
    row: int  # of the first in the tree, counted from the first row of the copy


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the branches' queries are in the query tensor."""

    tree: Tree
    queries: tuple[_Queries, ...]
    first: int  # row where the first copy begins
    stride: int  # rows of a copy

    def all_copies(self, queries: _Queries) -> _Placed:
        """These queries below every document; their position counts from the document's end."""
        copies = len(self.tree.documents)
        rows = Rows(self.first + queries.start, queries.tokens, copies, self.stride)
        return _Placed(rows, queries.position)

    def one_copy(self, queries: _Queries, document: int) -> _Placed:
        rows = Rows(self.first + document * self.stride + queries.start, queries.tokens)
        end = self.tree.prefix_tokens + self.tree.documents[document]
        return _Placed(rows, end + queries.position)


def _documents(tree: Tree) -> list[_Placed]:
    starts = zip(tree.document_starts, tree.documents, strict=True)
    return [_Placed(Rows(start, tokens), tree.prefix_tokens) for start, tokens in starts]


def _keys(tree: Tree, span: Span) -> _Placed:
    """A span's rows below every document, as keys."""
    start = tree.document_rows + span.start
    rows = Rows(start, span.tokens, len(tree.documents), tree.branch_rows)
    return _Placed(rows, span.position)


def _over_prefix(
    layout: _Layout, documents: Sequence[_Placed], window: int | None
) -> Iterator[Segment]:
    tree = layout.tree
    if not tree.prefix_tokens or not tree.documents:
        return
    prefix = _Placed(Rows(0, tree.prefix_tokens), 0)
    farthest = tree.prefix_tokens + max(tree.documents) + tree.depth - 1
    if window is None or farthest < window:
        rows = layout.first + len(tree.documents) * layout.stride
        yield Segment(Rows(0, rows), prefix.rows, from_prefix=True)
        return
    below = (
        layout.one_copy(queries, document)
        for document in range(len(tree.documents))
        for queries in layout.queries
    )
    for placed in (*documents, *below):
        yield from _in_window(placed, prefix, window, from_prefix=True)


def _over_documents(layout: _Layout, window: int | None) -> Iterator[Segment]:
    tree = layout.tree
    for document, placed in enumerate(_documents(tree) if layout.queries else ()):
        if window is None or placed.rows.tokens + tree.depth - 1 < window:
            start = layout.first + document * layout.stride
            yield Segment(Rows(start, layout.stride), placed.rows)
            continue
        for queries in layout.queries:
            yield from _in_window(layout.one_copy(queries, document), placed, window)


def _over_span(layout: _Layout, span: Span, window: int | None) -> Iterator[Segment]:
    below = [q for q in layout.queries if span.stop <= q.row < span.subtree_stop]
    if not below or not layout.tree.documents:
        return
    keys = _keys(layout.tree, span)
    farthest = max(queries.position + queries.tokens - 1 for queries in below)
    if window is None or farthest - span.position < window:
        start, stop = below[0].start, below[-1].start + below[-1].tokens
        whole = Rows(layout.first + start, stop - start, keys.rows.copies, layout.stride)
        yield Segment(whole, keys.rows)
        return
    for queries in below:
        yield from _in_window(layout.all_copies(queries), keys, window)


def _in_window(
    queries: _Placed, keys: _Placed, window: int | None, *, from_prefix: bool = False
) -> Iterator[Segment]:
    """The segment of the queries that still see some of the keys, all of which are before them."""
    if window is None:
        yield Segment(queries.rows, keys.rows, from_prefix=from_prefix)
        return
    last_key = keys.position + keys.rows.tokens - 1
    seeing = min(queries.rows.tokens, last_key + window - queries.position)
    if seeing <= 0:
        return
    unseen = max(0, queries.position - window + 1 - keys.position)  # keys that no query sees
    offset = queries.position - keys.position - unseen
    hides = offset + seeing > window
    yield Segment(
        queries.rows.part(0, seeing),
        keys.rows.part(unseen, keys.rows.tokens - unseen),
        from_prefix=from_prefix,
        window=window if hides else None,
        offset=offset if hides else 0,
    )
