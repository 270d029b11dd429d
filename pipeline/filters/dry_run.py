"""What a filter would drop, and what other shares would; nothing is written. Entry: `preview`.

The labels are read twice: once for the thresholds of `drop_top`, once for what they drop. Each
document is held as 17 bytes, and 12 more for each clause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.filters.inputs import check_columns_of
from pipeline.filters.labelled import labelled_shards
from pipeline.filters.policy import BoundClause, threshold
from pipeline.filters.rule import SnapshotRule
from pipeline.ledger.rows import DOCUMENT_SCHEMA, refuse_changed
from pipeline.options import FilterOptions
from pipeline.spec.schema import JobSpec

# The shares of the documents that a grid is computed for.
GRID = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
ALL = "all"


@dataclass(frozen=True, slots=True)
class Size:
    """A number of documents, with what they hold."""

    documents: int = 0
    chars: int = 0
    tokens: int = 0  # that the model reads of them


@dataclass(frozen=True, slots=True)
class GridRow:
    """What a share of the highest scores holds, in one group."""

    share: float
    group: str
    threshold: float
    dropped: Size


@dataclass(frozen=True, slots=True)
class ClausePreview:
    """One clause of the policy, and a grid of other shares for its score and groups."""

    clause: Mapping[str, Any]
    grid: tuple[GridRow, ...]


@dataclass(frozen=True, slots=True)
class FilterPreview:
    """What a filter would do."""

    snapshot: int
    keep: str | None
    on_error: str
    kept: Size
    dropped: Size
    reasons: Mapping[str, int]
    clauses: tuple[ClausePreview, ...]
    # By group of the first clause with groups: what is kept and dropped.
    groups: Mapping[str, tuple[Size, Size]] = field(default_factory=dict)


@dataclass(slots=True)
class _Rows:
    """What is held of each row."""

    kept: list[NDArray[np.bool_]]
    chars: list[NDArray[np.int64]]
    tokens: list[NDArray[np.int64]]


def preview(spec: JobSpec, options: FilterOptions, *, cache_dir: Path) -> FilterPreview:
    """What the spec's filter would drop; SpecError as the filter itself raises it."""
    rule = SnapshotRule.of(spec)
    contents = rule.contents
    refuse_changed(rule.store, contents, list(contents.tasks))
    shards, _ = labelled_shards(spec, rule.store, contents, cache_dir)
    read = [shards[named.sid] for named in contents.shards]
    storage = spec.input.storage_options
    check_columns_of(read, storage, rule.policy.inputs, place="filter")
    judge = rule.judge(rule.with_thresholds(shards))
    on_error = options.on_error or rule.filter.on_error
    tasks = [name for name in rule.schema.names if name not in DOCUMENT_SCHEMA.names]
    counted = next((task for task in tasks if task in judge.columns), tasks[0])
    rows, reasons = _Rows([], [], []), Counter[str]()
    scores: list[list[NDArray[np.float64]]] = [[] for _ in judge.clauses]
    codes: list[list[NDArray[np.int32]]] = [[] for _ in judge.clauses]
    numbers: list[dict[str, int]] = [{} for _ in judge.clauses]
    for batch, failed in rule.rows(shards):
        why = judge.reasons(batch, failed, on_error)
        reasons.update(filter(None, why))
        rows.kept.append(np.array([not reason for reason in why], np.bool_))
        rows.chars.append(batch.column("n_chars").to_numpy(zero_copy_only=False))
        tokens = pc.fill_null(batch.column(counted).field("n_tokens"), 0)
        rows.tokens.append(tokens.to_numpy(zero_copy_only=False))
        answered = np.array([not status for status in failed], np.bool_)
        for number, clause in enumerate(judge.clauses):
            scores[number].append(np.where(answered, clause.scores(batch), np.nan))
            codes[number].append(clause.codes(batch, numbers[number]))
    kept, chars = np.concatenate(rows.kept), np.concatenate(rows.chars)
    held = np.concatenate(rows.tokens)

    def size(chosen: NDArray[np.bool_]) -> Size:
        return Size(int(chosen.sum()), int(chars[chosen].sum()), int(held[chosen].sum()))

    by_group: dict[str, tuple[Size, Size]] = {}
    grouped = [number for number, clause in enumerate(judge.clauses) if clause.clause.by]
    for first in grouped[:1]:
        code = np.concatenate(codes[first])
        for name, own in sorted(numbers[first].items()):
            by_group[name] = size((code == own) & kept), size((code == own) & ~kept)
    return FilterPreview(
        snapshot=contents.number,
        keep=judge.policy.keep,
        on_error=on_error,
        kept=size(kept),
        dropped=size(~kept),
        reasons=dict(reasons),
        clauses=tuple(
            _clause_preview(
                clause,
                np.concatenate(scores[number]),
                np.concatenate(codes[number]),
                numbers[number],
                size,
            )
            for number, clause in enumerate(judge.clauses)
        ),
        groups=by_group,
    )


def _clause_preview(
    clause: BoundClause,
    score: NDArray[np.float64],  # [docs]
    code: NDArray[np.int32],  # [docs]: the number of a group
    numbers: Mapping[str, int],  # of groups, by name
    size: Callable[[NDArray[np.bool_]], Size],
) -> ClausePreview:
    """The clause with what each share of `GRID` drops, of all documents and of each group."""
    parts = {ALL: np.isfinite(score)}
    if clause.clause.by:
        parts |= {name: (code == own) & parts[ALL] for name, own in sorted(numbers.items())}
    cells = []
    for name, part in parts.items():
        for share in GRID if part.any() else ():
            limit = threshold(score[part], share)
            cells.append(GridRow(share, name, limit, size(part & (score > limit))))
    return ClausePreview(asdict(clause.clause), tuple(cells))
