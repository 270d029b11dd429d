"""What a report counts in the table of a snapshot's decisions: scores, lengths, examples.

Entry points: `tallied_columns` for the columns that the table needs, `score_counts`, `bar_counts`,
`examples`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.filters.decisions import Decisions
from pipeline.filters.snapshot_rule import SnapshotRule
from pipeline.ledger.snapshots import SnapshotTask

BARS = 50  # of a histogram
LENGTHS = (200, 1_000, 5_000, 20_000)  # characters: the upper ends of groups of documents
SHOWN_LABELS = 12  # of a task: histograms and examples; the first in the spec's order
MOST_SCORES = 48
EXAMPLES = 3
SURE, BORDERLINE, KEPT, DROPPED = "sure", "borderline", "kept", "dropped"
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

    kind: str  # sure | borderline: of a label; kept | dropped: by the filter
    task: str | None
    label: str | None
    doc_id: str
    path: str
    row: int
    margin: float | None  # between the two likeliest labels, or those of the answer
    reason: str  # why the filter drops it, in words; "" where it is kept


def scored_labels(tasks: Mapping[str, SnapshotTask], first: Collection[Label]) -> list[Label]:
    """The labels whose probabilities are counted: of each task, those that the rule reads first."""
    scored = []
    for task, named in tasks.items():
        if "p" in named.columns:
            labels = sorted(named.labels, key=lambda label: (task, label) not in first)
            scored += [(task, label) for label in labels[:SHOWN_LABELS]]
    return scored[:MOST_SCORES]


def tallied_columns(
    rule: SnapshotRule, rows: pa.RecordBatch, *, scored: Sequence[Label]
) -> dict[str, pa.Array]:
    """The columns that a report needs, of these rows.

    They are those of every document, `grp` (the group), of each task `TASK_label`, and `p_N` of
    scored label N. Of the kind `multi`, `TASK_labels`: a list. Of the kind `score`, also
    `TASK_score`.
    """
    columns = {name: rows.column(name) for name in ("doc_id", "path", "content_hash", "status")}
    columns["grp"] = rule.groups(rows)
    for task, named in rule.contents.tasks.items():
        for name in ("label", "labels", "score", "status", "margin"):
            if name in named.columns:
                columns[f"{task}_{name}"] = pc.struct_field(rows.column(task), name)
    for number, (task, label) in enumerate(scored):
        columns[f"p_{number}"] = pc.struct_field(rows.column(task), ["p", label])
    return columns


def score_counts(table: Decisions, scored: Sequence[Label]) -> Iterator[ScoreCounts]:
    """Documents by the probability of each label."""
    for number, (task, label) in enumerate(scored):
        yield ScoreCounts(task, label, bar_counts(table, f"p_{number}", 0, 1))


def bar_counts(table: Decisions, column: str, low: float, high: float) -> tuple[int, ...]:
    """The documents with a number in the column, in BARS bars of equal width."""
    bar = f"least(floor(({column}::DOUBLE - ?) / ? * {BARS}), {BARS - 1})::INTEGER"
    query = f"select {bar} as bar, count(*) from documents where isfinite({column}) group by bar"
    counts: dict[int, int] = dict(table.rows(query, [low, high - low]))
    return tuple(counts.get(number, 0) for number in range(BARS))


def examples(
    table: Decisions, tasks: Mapping[str, SnapshotTask], scored: Sequence[Label] = ()
) -> Iterator[ShownDocument]:
    """The documents to show: by the filter's decision, then of each label. Equal texts are one.

    Of kind `multi`, the margin is that of the label where it is `scored`, else of the answer.
    """
    for kind, condition in ((KEPT, "not dropped"), (DROPPED, "dropped")):
        for document in _first(table, f"status = 'ok' and {condition}", "0"):
            yield ShownDocument(kind, None, None, *document[:3], None, document[-1])
    for task, named in tasks.items():
        is_multi = "labels" in named.columns
        has_label = f"list_contains({task}_labels, ?)" if is_multi else f"{task}_label = ?"
        for label in named.labels[:SHOWN_LABELS]:
            margin = f"{task}_margin"
            if is_multi and (task, label) in scored:
                margin = f"abs(2 * p_{scored.index((task, label))} - 1)"
            where = f"{has_label} and isfinite({margin})"
            for kind, order in ((SURE, f"-{margin}"), (BORDERLINE, margin)):
                for doc_id, path, row, place, reason in _first(table, where, order, label):
                    yield ShownDocument(kind, task, label, doc_id, path, row, abs(place), reason)


def _first(
    table: Decisions, where: str, order: str, *values: str
) -> list[tuple[str, str, int, float, str]]:
    """Id, path, row, place and reason of the first documents in an order, of different texts."""
    chosen = f"select *, {order} as place from documents where {where}"
    return table.rows(
        f"""
        with texts as (
            select content_hash, min(place) as place from ({chosen}) group by content_hash
            order by place, content_hash limit {EXAMPLES}
        )
        select doc_id, path, row, place, why
        from ({chosen}) join texts using (content_hash, place)
        qualify row_number() over (partition by content_hash order by path, row) = 1
        order by place, content_hash
        """,
        values * 2,
    )
