"""Plan a layer's attention over a tree: which rows attend to which rows.

Entry points: `plan_attention` for a layer that is computed at every row, `plan_ends` for a layer
that is computed at a few rows only. A segment joins rows of queries and rows of keys; the segments
of later levels are merged by log-sum-exp into those of the first, which holds every row. So a
document's keys are read once for all its questions, as in Hydragen (Juravsky et al., 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline.inference.attention.tree import Span, Tree


@dataclass(frozen=True, slots=True)
class Range:
    """Consecutive rows, and copies of them at equal distances."""

    start: int
    tokens: int
    position: int = 0  # of the first row; copies below several documents count from their ends
    copies: int = 1
    stride: int = 0  # rows from one copy to the next

    @property
    def stop(self) -> int:
        """Where the first copy ends."""
        return self.start + self.tokens

    def part(self, start: int, tokens: int) -> Range:
        """`tokens` of these rows, from number `start` on, in every copy."""
        position = self.position + start
        return replace(self, start=self.start + start, tokens=tokens, position=position)


@dataclass(frozen=True, slots=True)
class Segment:
    """Attention of query rows over key rows, copy by copy.

    A query sees the keys up to its own position (`causal`), and only those less than `window`
    positions before it; None where the window hides no key.
    """

    queries: Range
    keys: Range
    from_prefix: bool = False  # keys of the kept prefix, not of this batch
    causal: bool = False
    window: int | None = None

    @property
    def offset(self) -> int:
        """The first query's position minus the first key's, where there is a window."""
        return self.queries.position - self.keys.position


Level = tuple[Segment, ...]  # no row is a query twice
# One layer's attention: the first level holds every row, the others are merged into it.
AttentionPlan = tuple[Level, ...]


def plan_attention(tree: Tree, *, window: int | None) -> AttentionPlan:
    """The segments for layers that see `window` positions back; None: all positions."""
    queries = tuple(Range(span.start, span.tokens, span.position) for span in tree.spans)
    rows = tuple(span.start for span in tree.spans)
    layout = _Layout(tree, queries, rows, tree.document_rows, tree.branch_rows)
    documents = _documents(tree)
    every_span = (*documents, *(layout.all_copies(each) for each in queries)) if documents else ()
    own = [
        Segment(each, each, causal=True, window=window if window and each.tokens > window else None)
        for each in every_span
    ]
    return _plan(own, layout, documents, window)


def plan_ends(tree: Tree, ends: Sequence[int], *, window: int | None) -> AttentionPlan:
    """The segments for a layer that is computed at the last rows of some spans only.

    `ends` are ascending rows of one copy. The query tensor has these rows only, document by
    document: row `document * len(ends) + i`. The keys are all of the tree's, in the tree's rows.
    """
    span_at = {span.stop - 1: span for span in tree.spans}
    spans = [span_at[row] for row in ends]
    queries = tuple(Range(i, 1, span.position + span.tokens - 1) for i, span in enumerate(spans))
    layout = _Layout(tree, queries, tuple(ends), first=0, stride=len(ends))
    own = [
        segment
        for each, span in zip(queries, spans, strict=True)
        for segment in _in_window(layout.all_copies(each), _keys(tree, span), window)
    ]
    return _plan(own, layout, [], window)


def _plan(
    own: Sequence[Segment], layout: _Layout, documents: Sequence[Range], window: int | None
) -> AttentionPlan:
    """`documents` are those whose own rows are queries, before the rows of the branches."""
    over_spans = (_over_span(layout, span, window) for span in layout.tree.spans)
    above = (_over_prefix(layout, documents, window), _over_documents(layout, window), *over_spans)
    levels = (tuple(level) for level in (own, *above))
    return tuple(level for level in levels if level)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the branches' queries are in the query tensor."""

    tree: Tree
    # Of each copy of the branches: whole spans, or the last rows of some. Rows count from the first
    # query row of the copy, positions from the document's end.
    queries: tuple[Range, ...]
    rows: tuple[int, ...]  # of the first query of each in the tree, counted from the copy's first
    first: int  # row where the first copy begins
    stride: int  # rows of a copy

    def all_copies(self, queries: Range) -> Range:
        """These queries below every document."""
        copies, start = len(self.tree.documents), self.first + queries.start
        return replace(queries, start=start, copies=copies, stride=self.stride)

    def one_copy(self, queries: Range, document: int) -> Range:
        """These queries below one document, at their positions from the root."""
        start = self.first + document * self.stride + queries.start
        end = self.tree.prefix_tokens + self.tree.documents[document]
        return Range(start, queries.tokens, end + queries.position)


def _documents(tree: Tree) -> list[Range]:
    starts = zip(tree.document_starts, tree.documents, strict=True)
    return [Range(start, tokens, tree.prefix_tokens) for start, tokens in starts]


def _keys(tree: Tree, span: Span) -> Range:
    """A span's rows below every document, as keys."""
    start, copies = tree.document_rows + span.start, len(tree.documents)
    return Range(start, span.tokens, span.position, copies, tree.branch_rows)


def _over_prefix(
    layout: _Layout, documents: Sequence[Range], window: int | None
) -> Iterator[Segment]:
    tree = layout.tree
    if not tree.prefix_tokens or not tree.documents:
        return
    prefix = Range(0, tree.prefix_tokens)
    farthest = tree.prefix_tokens + max(tree.documents) + tree.depth - 1
    if window is None or farthest < window:
        rows = layout.first + len(tree.documents) * layout.stride
        yield Segment(Range(0, rows), prefix, from_prefix=True)
        return
    below = (
        layout.one_copy(queries, document)
        for document in range(len(tree.documents))
        for queries in layout.queries
    )
    for queries in (*documents, *below):
        yield from _in_window(queries, prefix, window, from_prefix=True)


def _over_documents(layout: _Layout, window: int | None) -> Iterator[Segment]:
    for number, document in enumerate(_documents(layout.tree) if layout.queries else ()):
        if window is None or document.tokens + layout.tree.depth - 1 < window:
            yield Segment(Range(layout.first + number * layout.stride, layout.stride), document)
            continue
        for queries in layout.queries:
            yield from _in_window(layout.one_copy(queries, number), document, window)


def _over_span(layout: _Layout, span: Span, window: int | None) -> Iterator[Segment]:
    pairs = zip(layout.queries, layout.rows, strict=True)
    below = [queries for queries, row in pairs if span.stop <= row < span.subtree_stop]
    if not below or not layout.tree.documents:
        return
    keys = _keys(layout.tree, span)
    farthest = max(queries.position + queries.tokens - 1 for queries in below)
    if window is None or farthest - span.position < window:
        whole = replace(below[0], tokens=below[-1].stop - below[0].start)
        yield Segment(layout.all_copies(whole), keys)
        return
    for queries in below:
        yield from _in_window(layout.all_copies(queries), keys, window)


def _in_window(
    queries: Range, keys: Range, window: int | None, *, from_prefix: bool = False
) -> Iterator[Segment]:
    """The segment of the queries that still see some of the keys, all of which are before them."""
    if window is None:
        yield Segment(queries, keys, from_prefix)
        return
    last_key = keys.position + keys.tokens - 1
    seeing = min(queries.tokens, last_key + window - queries.position)
    if seeing <= 0:
        return
    unseen = max(0, queries.position - window + 1 - keys.position)  # keys that no query sees
    segment = Segment(
        queries.part(0, seeing), keys.part(unseen, keys.tokens - unseen), from_prefix, window=window
    )
    yield segment if segment.offset + seeing > window else replace(segment, window=None)
