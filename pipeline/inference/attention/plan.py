"""Plan a layer's attention over a tree: which rows attend to which rows.

Entry point: `plan_attention`. A segment joins rows of queries and rows of keys; the segments of
later levels are merged by log-sum-exp into those of the first, which holds every row. So a
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


def plan_attention(tree: Tree, *, window: int | None, branches_only: bool = False) -> AttentionPlan:
    """The segments for layers that see `window` positions back; None: all positions.

    With `branches_only`, the queries are the rows of the branches, which begin at query row 0.
    """
    layout = _Layout(tree, first=0 if branches_only else tree.document_rows)
    documents = [] if branches_only else _documents(tree)
    themselves = [(document, document) for document in documents]
    if tree.documents:
        pairs = zip(layout.queries, tree.spans, strict=True)
        themselves += [(layout.all_copies(queries), _keys(tree, span)) for queries, span in pairs]
    own = [
        Segment(q, k, causal=True, window=window if window and k.tokens > window else None)
        for q, k in themselves
    ]
    over_spans = (_over_span(layout, span, window) for span in tree.spans)
    above = (_over_prefix(layout, documents, window), _over_documents(layout, window), *over_spans)
    levels = (tuple(level) for level in (own, *above))
    return tuple(level for level in levels if level)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the queries of the branches are in the query tensor."""

    tree: Tree
    first: int  # row where the first copy begins

    @property
    def queries(self) -> tuple[Range, ...]:
        """The spans of one copy: rows from its first one, positions from the document's end."""
        return tuple(Range(span.start, span.tokens, span.position) for span in self.tree.spans)

    def all_copies(self, queries: Range) -> Range:
        """These queries below every document."""
        copies, start = len(self.tree.documents), self.first + queries.start
        return replace(queries, start=start, copies=copies, stride=self.tree.branch_rows)

    def one_copy(self, queries: Range, document: int) -> Range:
        """These queries below one document, at their positions from the root."""
        start = self.first + document * self.tree.branch_rows + queries.start
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
        rows = layout.first + len(tree.documents) * tree.branch_rows
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
    branch_rows = layout.tree.branch_rows
    for number, document in enumerate(_documents(layout.tree) if branch_rows else ()):
        if window is None or document.tokens + layout.tree.depth - 1 < window:
            yield Segment(Range(layout.first + number * branch_rows, branch_rows), document)
            continue
        for queries in layout.queries:
            yield from _in_window(layout.one_copy(queries, number), document, window)


def _over_span(layout: _Layout, span: Span, window: int | None) -> Iterator[Segment]:
    below = [each for each in layout.queries if span.stop <= each.start < span.subtree_stop]
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
