"""What a report counts in the table of a snapshot's decisions: scores, lengths, examples.

Entry points: `score_counts`, `bar_counts` and `examples`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.filters.decisions import Decisions
from pipeline.ledger.columns import CHUNK
from pipeline.ledger.snapshots import SnapshotTask
from pipeline.sources.rule import named, quoted

BARS = 50  # of a histogram
LENGTHS = (200, 1_000, 5_000, 20_000)  # characters: the upper ends of groups of documents
SHOWN_LABELS = 12  # of a task: histograms and examples; the first in the spec's order
MOST_SCORES = 48
EXAMPLES = 3
LEAST_SURE, KEPT, DROPPED = "least sure", "kept", "dropped"
# SQL of a group of documents by their length.
_UP_TO = " ".join(f"when n_chars <= {end} then 'up to {end:,} characters'" for end in LENGTHS)
BY_LENGTH = f"case {_UP_TO} else 'above {LENGTHS[-1]:,} characters' end"

Label = tuple[str, str]  # of a task: both names


@dataclass(frozen=True, slots=True)
class ScoreCounts:
    """Documents by the probability of a label."""

    task: str
    label: str
    counts: tuple[int, ...]  # in BARS bars of equal width from 0 to 1


@dataclass(frozen=True, slots=True)
class ShownDocument:
    """One document that a report shows."""

    kind: str  # least sure: of a task; kept | dropped: by the filter
    task: str | None
    label: str | None
    doc_id: str
    path: str
    row: int
    margin: float | None  # between the two likeliest labels, or those of the answer
    reason: str  # why the filter drops it, in words; "" where it is kept
    start: int = 0  # of the chunk whose answer it is, in characters


def scored_labels(tasks: Mapping[str, SnapshotTask], first: Collection[Label]) -> list[Label]:
    """The labels whose probabilities are counted: of each task, those that the rule reads first."""
    scored = []
    for task, published in tasks.items():
        if "p" in published.columns:
            labels = sorted(published.labels, key=lambda label: (task, label) not in first)
            scored += [(task, label) for label in labels[:SHOWN_LABELS]]
    return scored[:MOST_SCORES]


def score_counts(table: Decisions, scored: Sequence[Label]) -> Iterator[ScoreCounts]:
    """Documents by the probability of each label."""
    for task, label in scored:
        yield ScoreCounts(task, label, bar_counts(table, named(task, "p", label), 0, 1))


def bar_counts(table: Decisions, column: str, low: float, high: float) -> tuple[int, ...]:
    """The documents with a number in the column, in BARS bars of equal width."""
    bar = f"least(floor(({column}::DOUBLE - ?) / ? * {BARS}), {BARS - 1})::INTEGER"
    query = f"select {bar} as bar, count(*) from documents where isfinite({column}) group by bar"
    counts: dict[int, int] = dict(table.rows(query, [low, high - low]))
    return tuple(counts.get(number, 0) for number in range(BARS))


def examples(
    table: Decisions, tasks: Mapping[str, SnapshotTask], scored: Sequence[Label] = ()
) -> Iterator[ShownDocument]:
    """The documents to show: by the filter's decision, then of each task. Equal texts are one.

    Of kind `multi`, the label is the least sure of those that are `scored`.
    """
    for kind, condition in ((KEPT, "not _dropped"), (DROPPED, "_dropped")):
        by_hash = _first(table, f"status = 'ok' and {condition}", "0")
        for doc_id, path, row, _, reason, _, _ in by_hash:
            yield ShownDocument(kind, None, None, doc_id, path, row, None, reason)
    for task, published in tasks.items():
        label, margin = named(task, "label"), named(task, "margin")
        if "labels" in published.columns:
            of_task = [name for of, name in scored if of == task]
            if not of_task:
                continue
            names = ", ".join(map(quoted, of_task))
            own = ", ".join(f"abs(2 * {named(task, 'p', name)} - 1)" for name in of_task)
            margin = f"list_min([{own}])"
            label = f"[{names}][list_position([{own}], {margin})]"
        start = named(task, CHUNK, "start") if CHUNK in published.columns else "0"
        for shown in _first(table, f"isfinite({margin})", margin, label, f"coalesce({start}, 0)"):
            doc_id, path, row, least, reason, name, begins = shown
            yield ShownDocument(LEAST_SURE, task, name, doc_id, path, row, least, reason, begins)


def _first(
    table: Decisions, where: str, order: str, label: str = "''", start: str = "0"
) -> list[tuple[Any, ...]]:
    """The first documents in an order, of different texts: id, path, row, place, reason, label,
    and where the text begins that is shown.
    """
    columns = f"*, {order} as _place, {label} as _named, {start} as _start"
    chosen = f"select {columns} from documents where {where}"
    return table.rows(
        f"""
        with texts as (
            select content_hash, min(_place) as _place from ({chosen}) group by content_hash
            order by _place, content_hash limit {EXAMPLES}
        )
        select doc_id, path, row, _place, _why, _named, _start
        from ({chosen}) join texts using (content_hash, _place)
        qualify row_number() over (partition by content_hash order by path, row) = 1
        order by _place, content_hash
        """
    )
