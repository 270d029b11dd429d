"""What a filter would drop, and what other shares would; nothing is written. Entry: `preview`.

The labels are read twice: once for the thresholds of `drop_top`, once for what they drop. Each
document is held as 17 bytes, and 12 more for each clause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.filters.inputs import check_columns_of
from pipeline.filters.labelled import labelled_shards
from pipeline.filters.policy import BoundClause, CauseCounts, Judge, threshold
from pipeline.filters.removal import removed_sql
from pipeline.filters.rule import SnapshotRule
from pipeline.ledger.rows import DOCUMENT_SCHEMA, refuse_changed
from pipeline.options import FilterOptions
from pipeline.sources.shards import Shard
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
    removes: str  # SQL that is true for exactly the dropped documents
    kept: Size  # also the documents at which the filter stops
    dropped: Size
    reasons: Mapping[str, int]  # dropped documents by cause; with two causes, a document is in both
    several: int  # documents with more than one cause
    failed: Mapping[str, int]  # documents without an answer, by status
    stops: bool  # the filter fails because of them, and writes nothing
    complete: bool  # the snapshot leaves out no document of the input
    clauses: tuple[ClausePreview, ...]
    # By group of the first clause with groups: what is kept and dropped.
    groups: Mapping[str, tuple[Size, Size]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What is held of all rows."""

    kept: NDArray[np.bool_]  # [docs]
    chars: NDArray[np.int64]  # [docs]
    tokens: NDArray[np.int64]  # [docs]
    causes: CauseCounts
    # Of each clause:
    scores: Sequence[NDArray[np.float64]]  # [docs]
    codes: Sequence[NDArray[np.int32]]  # [docs]: the number of a group
    numbers: Sequence[Mapping[str, int]]  # of groups, by name

    def size(self, chosen: NDArray[np.bool_]) -> Size:
        return Size(
            int(chosen.sum()), int(self.chars[chosen].sum()), int(self.tokens[chosen].sum())
        )


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
    rows = _rows(rule, judge, on_error, shards)
    groups: dict[str, tuple[Size, Size]] = {}
    grouped = [number for number, clause in enumerate(judge.clauses) if clause.clause.by]
    for first in grouped[:1]:
        for name, own in sorted(rows.numbers[first].items()):
            of_group = rows.codes[first] == own
            groups[name] = rows.size(of_group & rows.kept), rows.size(of_group & ~rows.kept)
    return FilterPreview(
        snapshot=contents.number,
        keep=judge.policy.keep,
        on_error=on_error,
        removes=removed_sql(judge, on_error),
        kept=rows.size(rows.kept),
        dropped=rows.size(~rows.kept),
        reasons=dict(rows.causes.reasons),
        several=rows.causes.several,
        failed=dict(rows.causes.failed.most_common()),
        stops=on_error == "fail" and bool(rows.causes.failed),
        complete=not contents.missing_rows and not contents.missing_files,
        clauses=tuple(
            _clause_preview(clause, rows, number) for number, clause in enumerate(judge.clauses)
        ),
        groups=groups,
    )


def _rows(rule: SnapshotRule, judge: Judge, on_error: str, shards: Mapping[str, Shard]) -> _Rows:
    """All rows of the snapshot, and what the filter does with them."""
    tasks = [name for name in rule.schema.names if name not in DOCUMENT_SCHEMA.names]
    counted = next((task for task in tasks if task in judge.columns), tasks[0])
    kept, chars, tokens = [], [], []
    causes = CauseCounts()
    scores: list[list[NDArray[np.float64]]] = [[] for _ in judge.clauses]
    codes: list[list[NDArray[np.int32]]] = [[] for _ in judge.clauses]
    numbers: list[dict[str, int]] = [{} for _ in judge.clauses]
    for batch, failed in rule.rows(shards):
        decision = judge.decide(batch, failed, on_error)
        causes.add(decision, failed)
        kept.append(~decision.dropped)
        chars.append(batch.column("n_chars").to_numpy(zero_copy_only=False))
        read = pc.fill_null(batch.column(counted).field("n_tokens"), 0)
        tokens.append(read.to_numpy(zero_copy_only=False))
        answered = np.array([not status for status in failed], np.bool_)
        for number, clause in enumerate(judge.clauses):
            scores[number].append(np.where(answered, clause.scores(batch), np.nan))
            codes[number].append(clause.codes(batch, numbers[number]))
    return _Rows(
        kept=np.concatenate(kept),
        chars=np.concatenate(chars),
        tokens=np.concatenate(tokens),
        causes=causes,
        scores=[np.concatenate(each) for each in scores],
        codes=[np.concatenate(each) for each in codes],
        numbers=numbers,
    )


def _clause_preview(clause: BoundClause, rows: _Rows, number: int) -> ClausePreview:
    """The clause with what each share of `GRID` drops, of all documents and of each group."""
    score, code = rows.scores[number], rows.codes[number]
    parts = {ALL: np.isfinite(score)}
    if clause.clause.by:
        groups = sorted(rows.numbers[number].items())
        parts |= {name: (code == own) & parts[ALL] for name, own in groups}
    cells = []
    for name, part in parts.items():
        for share in GRID if part.any() else ():
            limit = threshold(score[part], share)
            cells.append(GridRow(share, name, limit, rows.size(part & (score > limit))))
    return ClausePreview(asdict(clause.clause), tuple(cells))
